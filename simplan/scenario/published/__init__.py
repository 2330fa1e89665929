"""Files of published runs, which are scenarios with ``measured``."""
