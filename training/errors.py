"""Errors that are the input's fault, told apart from faults of the machine or the code."""


class BadInput(ValueError):
    """Input that can't be used: the message names the key or file, the value and what would be accepted.

    Trying again with the same input is pointless, so the pipeline never retries it.
    """
