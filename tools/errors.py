"""The one exception of the build: its text is all that the user sees."""


class BuildError(RuntimeError):
    """The build cannot go on. The message says what was expected, what was found and what to do."""
