"""Errors say what is wrong and what would work, on this side of a process boundary and on the other."""

import copy
import pickle

import pytest

from weft.core import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hint", ["", "Use 3."])
def test_errors_survive_pickling(kind, hint):
    error = kind("2 is not 3.", hint=hint)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), twin.message, twin.hint) == (kind, "2 is not 3.", hint)
        assert str(twin) == f"2 is not 3. {hint}".strip()


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_can_be_caught_as_one(kind):
    with pytest.raises(errors.WeftError):
        raise kind("no.")


def test_errors_are_also_what_python_calls_them():
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.CommError, RuntimeError)
    assert issubclass(errors.MissingError, ImportError)
