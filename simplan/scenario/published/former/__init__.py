"""Files of published runs in the schema before scenarios with ``measured``, and what its keys left open.

Nothing else needs this package: it is deleted with the last file of that schema.
"""
