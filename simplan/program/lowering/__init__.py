"""From a plan to the operations of every rank."""
