"""How frameworks compute layers, where that differs from eager torch modules."""
