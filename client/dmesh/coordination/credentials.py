"""What this process shows a coordinator: the token with every call, over an encrypted channel if so set."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import grpc

from dmesh import tokens
from dmesh._log import logger
from dmesh.coordination.channel import ChannelOptions
from dmesh.errors import ConfigurationError
from dmesh.tokens import TokenSource
from dmesh.watched_files import WatchedFiles

Metadata = tuple[tuple[str, str], ...]
_Listener = Callable[[grpc.ChannelConnectivity], None]


class Credentials:
    """The token of this process. Thread-safe; its `repr` does not show the token.

    A token that came from a file is read again when the file changes, so that tokens can be replaced under
    running clients: put the new one into the server's file beside the old one, then into the clients' files,
    then take the old one out.
    """

    def __init__(self, source: TokenSource | None) -> None:
        """Reads the token.

        Args:
            source: Where it comes from; None to show none.

        Raises:
            ConfigurationError: The source cannot be read.
        """
        self._source = source
        self._lock = threading.Lock()
        path = source.path if source is not None else None
        self._files = WatchedFiles([path]) if path is not None else None
        self._metadata = _metadata(source)

    def __repr__(self) -> str:
        origin = "no token" if self._source is None else f"token from {self._source.origin}"
        return f"<{type(self).__name__}: {origin}>"

    @classmethod
    def of_environment(cls) -> Credentials:
        """Takes the token from where the environment says, or from the default path.

        Raises:
            ConfigurationError: A file that is named cannot be read.
        """
        token, file = (os.environ.get(name, "").strip() for name in ("DMESH_TOKEN", "DMESH_TOKEN_FILE"))
        return cls(tokens.find(token, file))

    def metadata(self) -> Metadata:
        """Returns what to send with a call."""
        if self._files is not None and self._files.changed():
            try:
                metadata = _metadata(self._source)
            except ConfigurationError as error:  # as while it is being replaced
                logger.warning("keeping the token that was read before: %s", error)
            else:
                with self._lock:
                    self._metadata = metadata
        with self._lock:
            return self._metadata

    def channel(self, address: str, options: ChannelOptions) -> grpc.Channel:
        """Opens a channel to a coordinator."""
        return grpc.insecure_channel(address, options=options)

    def authorized(self, channel: grpc.Channel) -> grpc.Channel:
        """Returns a view of a channel, for stubs, whose calls all carry the token.

        gRPC's own call credentials work on encrypted channels only, and its interceptors cost a wrapper and a
        thread-safe proxy for every call.
        """
        return _AuthorizedChannel(channel, self.metadata)


def _metadata(source: TokenSource | None) -> Metadata:
    if source is None:
        return ()
    return (("authorization", f"Bearer {source.read()[0].value}"),)


class _AuthorizedChannel(grpc.Channel):
    """Adds metadata to the calls of those methods that stubs use."""

    def __init__(self, channel: grpc.Channel, metadata: Callable[[], Metadata]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self._channel.unary_unary(*args, **kwargs), self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self._channel.unary_stream(*args, **kwargs), self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self._channel.stream_unary(*args, **kwargs), self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self._channel.stream_stream(*args, **kwargs), self._metadata)

    def subscribe(self, callback: _Listener, try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: _Listener) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> _AuthorizedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AuthorizedMethod:
    """A method of a stub: called, or begun with `future`."""

    def __init__(self, method: Any, metadata: Callable[[], Metadata]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, request: object, timeout: float | None = None) -> Any:
        return self._method(request, timeout=timeout, metadata=self._metadata())

    def future(self, request: object, timeout: float | None = None) -> Any:
        return self._method.future(request, timeout=timeout, metadata=self._metadata())
