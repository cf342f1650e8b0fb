"""One folder an operation: its reference and inputs in ``__init__``, one file a variant beside it."""
