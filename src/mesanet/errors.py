"""The one exception of our own that callers may want to catch."""


class UserError(ValueError):
    """A mistake of the user's that is not about one argument; its text is one sentence that says what to do."""
