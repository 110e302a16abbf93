"""A server's key: read from the environment, sent in one header, and shown nowhere."""

from __future__ import annotations

import os

from leret.core.errors import PolicyError
from leret.http.messages import hide


class Key:
    """Holds a key without ever printing it.

    Args:
        value: the key; None for a server that asks for none.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | None = None) -> None:
        self._value = value

    @classmethod
    def of(cls, variable: str | None) -> Key:
        """The key in an environment variable; none where no variable is named.

        Raises:
            PolicyError: the variable is not set, or holds what no header can carry.
        """
        if variable is None:
            return cls()
        value = os.environ.get(variable, "").strip()
        if not value:
            raise PolicyError(
                f"the environment variable {variable} (policy.api_key_env) is not set; export the server's key in it"
            )
        if not value.isascii() or not value.isprintable():
            raise PolicyError(
                f"the environment variable {variable} (policy.api_key_env) holds line breaks or other characters that "
                "no header can carry; export the key alone in it"
            )
        return cls(value)

    def __repr__(self) -> str:
        return "Key()" if self._value is None else "Key([key])"

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled; read it from the environment where it is needed")

    def reveal(self) -> str | None:
        """The key itself, for a client library that sends it."""
        return self._value

    def headers(self) -> dict[str, str]:
        """The header that carries it."""
        return {} if self._value is None else {"Authorization": f"Bearer {self._value}"}

    def hide(self, told: str | bytes) -> str:
        """What a server or a library said, without the key: some repeat it in their errors."""
        text = told.decode(errors="replace") if isinstance(told, bytes) else told
        return text if self._value is None else hide(text, self._value)
