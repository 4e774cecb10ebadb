"""The one exception of the build: its text is all that the user sees."""


class BuildError(RuntimeError):
    """The build cannot go on. The message says what was expected and what was found; its last line, what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}\n  {remedy}" if remedy else message)
