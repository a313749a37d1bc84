import inspect

import pytest

from pdserve.kvtransfer import IntegrityError, PeerLost, TransferAborted, TransferTimeout, errors
from pdserve.kvtransfer.errors import FailureCode, KVTransferError, error_of_abort


def test_every_error_is_in_the_drawn_tree():
    classes = [
        each
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, Exception) and each.__module__ == errors.__name__
    ]

    assert len(classes) > 8
    for each in classes:
        assert issubclass(each, KVTransferError)
        assert each.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (FailureCode.WRONG_CHECKSUM, IntegrityError),
        (FailureCode.OVER_CREDIT, IntegrityError),
        (FailureCode.DEADLINE, TransferTimeout),
        (FailureCode.LEASE_EXPIRED, PeerLost),
        (FailureCode.UNKNOWN_TRANSFER, TransferAborted),
        ("a code of the owner", TransferAborted),
    ],
)
def test_an_abort_becomes_the_error_of_its_code(code, kind):
    error = error_of_abort(code, "because")

    assert type(error) is kind
    assert (error.code, error.message, error.retryable) == (code, "because", True)
