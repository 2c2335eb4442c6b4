"""Credentials of this process: the token with every call to a coordinator, over TLS if so set."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination import faults
from dmesh.coordination.channel import ChannelOptions
from dmesh.errors import ConfigurationError
from dmesh.security import tokens
from dmesh.security.certificates import (
    IdentityFiles,
    check_identity,
    load_authority,
    load_identity,
    read_pem,
)
from dmesh.security.tokens import TokenSource
from dmesh.security.watched_files import WatchedFiles

Metadata = tuple[tuple[str, str], ...]
_Listener = Callable[[grpc.ChannelConnectivity], None]

_KEPT_CHANNELS = 4
"""Channels with earlier certificates that are kept for the streams on them. Certificates are replaced every
few days or hours; a stream that outlasts this many replacements is built up again."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Encryption of the channel to a coordinator."""

    ca: Path
    """`DMESH_TLS_CA`: authority that signed the coordinator's certificate."""
    identity: IdentityFiles | None = None
    """`DMESH_TLS_CERT`, `DMESH_TLS_KEY`: this process's own certificate, for coordinators that ask for it."""
    server_name: str | None = None
    """`DMESH_TLS_SERVER_NAME`: name in the coordinator's certificate, if it is not the one in its address."""

    @classmethod
    def of(
        cls, ca: str | None, cert: str | None, key: str | None, server_name: str | None
    ) -> ClientTls | None:
        """Take the values of the four variables; None if none is set.

        Raises:
            ConfigurationError: One of them is missing.
        """
        if ca is None:
            for name, value in (("CERT", cert), ("KEY", key), ("SERVER_NAME", server_name)):
                if value is not None:
                    raise ConfigurationError(
                        f"DMESH_TLS_{name} is set but DMESH_TLS_CA is not; set it to the PEM file of the "
                        "authority that signed the coordinator's certificate"
                    )
            return None
        if (cert is None) != (key is None):
            raise ConfigurationError("DMESH_TLS_CERT and DMESH_TLS_KEY belong together: set both, or none")
        identity = IdentityFiles(Path(cert), Path(key)) if cert is not None and key is not None else None
        return cls(Path(ca), identity, server_name)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return (self.ca, *((self.identity.cert, self.identity.key) if self.identity is not None else ()))

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files.

        Raises:
            ConfigurationError: One of them cannot be used, or the own certificate is not valid now.
        """
        ca = read_pem(self.ca, "DMESH_TLS_CA")
        if self.identity is None:
            return grpc.ssl_channel_credentials(ca)
        check_identity(self.identity, "DMESH_TLS_CERT/DMESH_TLS_KEY")
        cert, key = self.identity.cert.read_bytes(), self.identity.key.read_bytes()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def context(self) -> ssl.SSLContext:
        """Return the same for connections that are not gRPC's.

        Raises:
            ConfigurationError: A file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_authority(context, self.ca, "DMESH_TLS_CA")
        if self.identity is not None:
            load_identity(context, self.identity, "DMESH_TLS_CERT/DMESH_TLS_KEY")
        return context


class Credentials:
    """The token and the certificates of this process. Thread-safe; its `repr` does not show the token.

    What came from a file is read again when the file changes, so that it can be replaced under running
    clients. For a token: put the new one into the server's file beside the old one, then into the clients'
    files, then take the old one out. For certificates: replace the files; streams that are up stay.
    """

    def __init__(self, source: TokenSource | None, tls: ClientTls | None = None) -> None:
        """Read the token.

        Args:
            source: Where it comes from; None to show none.
            tls: How the channel is encrypted; None for not at all.

        Raises:
            ConfigurationError: The source cannot be read, or a certificate cannot be used.
        """
        self._source = source
        self.tls = tls
        """Encryption of the channel; None for none."""
        self._lock = Lock()
        path = source.path if source is not None else None
        self._files = WatchedFiles([path]) if path is not None else None
        self._metadata = _metadata(source)
        if tls is not None:
            tls.credentials()  # what is wrong with the files is said now

    def __repr__(self) -> str:
        origin = "no token" if self._source is None else f"token from {self._source.origin}"
        return f"<{type(self).__name__}: {origin}, {'no TLS' if self.tls is None else 'TLS'}>"

    @classmethod
    def of_environment(cls) -> Credentials:
        """Take token and certificates from where the environment says, the token also from the default path.

        Raises:
            ConfigurationError: A file that is named cannot be read.
        """

        def text(name: str) -> str | None:
            return os.environ.get(name, "").strip() or None

        tls = ClientTls.of(*(text(f"DMESH_TLS_{name}") for name in ("CA", "CERT", "KEY", "SERVER_NAME")))
        return cls(tokens.find(text("DMESH_TOKEN"), text("DMESH_TOKEN_FILE")), tls)

    def metadata(self) -> Metadata:
        """Return what to send with a call."""
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

    def channel(self, address: str, options: ChannelOptions) -> _AuthorizedChannel:
        """Open a channel to a coordinator, for stubs: all calls through it carry the token.

        gRPC's own call credentials work on encrypted channels only, and its interceptors cost a wrapper and a
        future of their own for every call.
        """
        return _AuthorizedChannel(self, address, options)


def _metadata(source: TokenSource | None) -> Metadata:
    if source is None:
        return ()
    return (("authorization", f"Bearer {source.read()[0].value}"),)


class _AuthorizedChannel(grpc.Channel):
    """Adds the token to calls; replaces a channel that could not connect, has old certificates, or is broken.

    gRPC's channels keep their certificates for life. So after a change, new calls go through a new channel,
    and the old one stays for the streams that it carries.

    A channel that failed to connect refuses calls at once and connects again in the background. Up to
    grpcio 1.78 nothing but a timer advances that attempt: it takes 8 to 18 s, and up to 1.70 it never ends
    unless `channel.prepare_grpc` came in time (grpc/grpc#38290). A new channel's first call waits for the
    connection, and advances it.

    A channel starts a thread for the first of the calls that are under way. If the thread cannot start, the
    channel counts it as started nevertheless: no later call ends, and closing the channel waits for ever.
    """

    def __init__(self, credentials: Credentials, address: str, options: ChannelOptions) -> None:
        self._credentials = credentials
        self._address = address
        self._options: list[tuple[str, int | str]] = [*options]
        tls = credentials.tls
        self._files = WatchedFiles(tls.paths) if tls is not None else None
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._lock = Lock()
        self._tls = None if tls is None else tls.credentials()
        self._channels = [self._open()]
        self._unconnected: grpc.Channel | None = None
        self._closed = False

    def current(self) -> grpc.Channel:
        """Return the channel for new calls."""
        renewed = self._read_again()
        with self._lock:
            channel, unconnected = self._channels[-1], self._unconnected
            self._unconnected = None
            if self._closed or not (renewed or channel is unconnected):
                return channel
            old = []
            if channel is unconnected:
                old.append(self._channels.pop())
            elif len(self._channels) == _KEPT_CHANNELS:
                old.append(self._channels.pop(0))
            channel = self._open()
            self._channels.append(channel)
        for one in old:
            one.close()
        return channel

    def note(self, channel: grpc.Channel, call: grpc.Call) -> None:
        """Note how a call ended; also on threads of gRPC's, which must not close the channel."""
        if faults.no_connection(call):
            with self._lock:
                self._unconnected = channel

    def drop(self, channel: grpc.Channel) -> None:
        """Replace a channel that could not start the thread for a call."""
        with self._lock:
            if self._closed or channel is not self._channels[-1]:
                return
            self._channels[-1] = self._open()
        # The way to close that does the missing thread's work, and so does not wait for it.
        code, _ = grpc.StatusCode.CANCELLED.value
        cast(Any, channel)._channel.close_on_fork(code, "it could not start a thread")

    def metadata(self) -> Metadata:
        """Return what to send with a call."""
        return self._credentials.metadata()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _AuthorizedMethod(self, "stream_stream", args, kwargs)

    def subscribe(self, callback: _Listener, try_to_connect: bool = False) -> None:
        self.current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: _Listener) -> None:
        self.current().unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def __enter__(self) -> _AuthorizedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_again(self) -> bool:
        """Read the certificates again if their files have changed; return whether there are new ones."""
        tls = self._credentials.tls
        if tls is None or self._files is None or not self._files.changed():
            return False
        try:
            self._tls = tls.credentials()
        except (ConfigurationError, OSError) as error:  # as while they are being replaced
            logger.warning("keeping the certificates that were read before: %s", error)
            return False
        return True

    def _open(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self._address, options=self._options)
        return grpc.secure_channel(self._address, self._tls, options=self._options)


def name_of(method: object) -> str:
    """Return the full name of a stub's method: `/dmesh.v1.CoordinationService/Leave`."""
    return method.name if isinstance(method, _AuthorizedMethod) else ""


class _AuthorizedMethod:
    """A method of a stub: called, or begun with `future`."""

    def __init__(
        self, channel: _AuthorizedChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind, self._args, self._kwargs = kind, args, kwargs
        self.name: str = args[0]
        """The method's full name."""
        self._made: tuple[grpc.Channel | None, Any] = (None, None)

    def __call__(self, request: object, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        channel, method = self._method()
        try:
            made = self._begin(channel, method, request, timeout, metadata)
        except grpc.RpcError as error:  # an answer that is one message, and was waited for
            self._channel.note(channel, cast(grpc.Call, error))
            raise
        return self._begun(channel, made) if self._kind.endswith("_stream") else made

    def future(self, request: object, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        channel, method = self._method()
        return self._begun(channel, self._begin(channel, method.future, request, timeout, metadata))

    def _begin(
        self,
        channel: grpc.Channel,
        begin: Callable[..., Any],
        request: object,
        timeout: float | None,
        metadata: Metadata,
    ) -> Any:
        try:
            return begin(request, timeout=timeout, metadata=self._channel.metadata() + metadata)
        except RuntimeError:  # there can be no more threads
            self._channel.drop(channel)
            raise

    def _begun(self, channel: grpc.Channel, call: Any) -> Any:
        call.add_done_callback(lambda done: self._channel.note(channel, done))
        return call

    def _method(self) -> tuple[grpc.Channel, Any]:
        current = self._channel.current()
        channel, method = self._made
        if channel is not current:
            method = getattr(current, self._kind)(*self._args, **self._kwargs)
            self._made = (current, method)
        return current, method
