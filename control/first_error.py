"""The first error of a task group by itself, so that callers handle errors and not groups of them."""


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the innermost first exception of `errors`."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
