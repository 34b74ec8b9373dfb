"""DataError: what the data is wrong with, and what to do next."""


class DataError(ValueError):
    """Bad or missing data; the trainer ends with exit code 14.

    Attributes:
        message: What failed, with the value and the limit.
        hint: The next step.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class LoaderStalled(DataError):  # noqa: N818 - the name says a state; it is a DataError
    """No batch arrived before the deadline, or the loader's thread died."""
