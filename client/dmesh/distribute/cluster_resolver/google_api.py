"""Google's APIs through Google's client library, with limits of time and size, and dmesh's errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dmesh.distribute.cluster_resolver.http_exchange import Reply, exchange, without_query
from dmesh.distribute.cluster_resolver.lookup_policy import Busy, LookupPolicy, parse_retry_after
from dmesh.errors import (
    ClusterLookupDeniedError,
    ClusterLookupError,
    ClusterLookupUnavailableError,
    ConfigurationError,
    MissingExtraError,
)

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_RATE_LIMITS = ("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED")


def require_client(resolver: str) -> None:
    """Raise an error if the client library is not installed.

    Args:
        resolver: Name of the resolver that needs it, for errors.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        for module in ("googleapiclient.discovery", "google.auth", "httplib2"):
            importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{resolver} uses Google's API through googleapiclient, which is not installed ({error}): "
            "pip install 'dmesh[google]', or pass service=..."
        ) from error


class ApiHttp:
    """Replacement of `httplib2.Http` for the client library's requests.

    Args:
        credentials: Credentials of google-auth; they are renewed when they are not accepted.
        policy: The limits of a request.
    """

    def __init__(self, credentials: Any, policy: LookupPolicy) -> None:
        self.credentials = credentials
        self._policy = policy
        self._httplib2: Any = importlib.import_module("httplib2")
        self._exceptions: Any = importlib.import_module("google.auth.exceptions")

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        redirections: int = 0,
        connection_type: object = None,
        **_: object,
    ) -> tuple[Any, bytes]:
        """Make a request like `httplib2.Http.request`, but follows no redirects.

        Returns:
            The `httplib2.Response` and the body.

        Raises:
            OSError: There is no connection.
            ClusterLookupError: The reply is too long.
        """
        del redirections, connection_type
        reply = self._authorized(uri, method, body, headers)
        if reply.status == 401:  # the token may have expired
            self.credentials.refresh(self._exchange_for_token)
            reply = self._authorized(uri, method, body, headers)
        return self._httplib2.Response({**reply.headers, "status": str(reply.status)}), reply.body

    def close(self) -> None:
        """Do nothing: there are no open connections."""

    def _authorized(
        self, url: str, method: str, body: str | bytes | None, headers: Mapping[str, str] | None
    ) -> Reply:
        sent = dict(headers or {})
        self.credentials.before_request(self._exchange_for_token, method, url, sent)
        return self._exchange(url, method, body, sent)

    def _exchange(
        self, url: str, method: str, body: str | bytes | None, headers: Mapping[str, str] | None
    ) -> Reply:
        return exchange(
            url,
            timeout=self._policy.attempt,
            most_bytes=self._policy.most_bytes,
            method=method,
            headers=headers,
            body=body.encode() if isinstance(body, str) else body,
        )

    def _exchange_for_token(
        self,
        url: str,
        method: str = "GET",
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: object,
    ) -> _TokenReply:
        """Make a request for the credentials, like `google.auth.transport.Request`."""
        del timeout  # the policy's is shorter
        try:
            reply = self._exchange(url, method, body, headers)
        except OSError as error:
            raise self._exceptions.TransportError(error) from error
        return _TokenReply(reply.status, reply.headers, reply.body)


@dataclass(frozen=True, slots=True)
class _TokenReply:
    """A reply with the interface of `google.auth.transport.Response`."""

    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)  # may have a token, and google-auth puts replies into its errors


def build_service(
    api: str,
    version: str,
    credentials: object,
    discovery_url: str | None,
    policy: LookupPolicy,
    resolver: str,
) -> Any:
    """Return an API object of `googleapiclient.discovery`.

    Args:
        api: Name of the API, such as `tpu`.
        version: Its version, such as `v2`.
        credentials: Credentials of google-auth; None or `default` for the application's default credentials.
        discovery_url: Template of the address of the API's description, with `{api}` and `{apiVersion}`;
            None for the description in the library.
        policy: Limits of its requests.
        resolver: Name of the resolver that needs it, for errors.

    Raises:
        MissingExtraError: The library is not installed.
        ClusterLookupDeniedError: There are no credentials.
        ClusterLookupError: The API does not exist, or its description cannot be read.
    """
    require_client(resolver)
    errors = importlib.import_module("googleapiclient.errors")
    if credentials is None or (isinstance(credentials, str) and credentials == "default"):
        credentials = _default_credentials()
    http = ApiHttp(credentials, policy)
    question = f"the description of the API {api} {version}"
    place = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    where = None if discovery_url is None else without_query(discovery_url)

    def attempt() -> Any:
        with _Translation(question):
            try:
                return importlib.import_module("googleapiclient.discovery").build(
                    api, version, http=http, cache_discovery=False, num_retries=0, **place
                )
            except errors.UnknownApiNameOrVersion as error:
                raise ClusterLookupError(
                    f"no {question} at {where!r}; check discovery_url and TPU_API_DISCOVERY_URL"
                ) from error
            except (errors.InvalidJsonError, errors.UnacceptableMimeTypeError) as error:
                raise ClusterLookupError(
                    f"{where!r} is not the URL of {question}: {error}; check discovery_url and "
                    "TPU_API_DISCOVERY_URL"
                ) from error

    return policy.ask(question, attempt)


def prepare(find_method: Callable[[], Any], question: str, **arguments: object) -> Any:
    """Return a request of an API object.

    Args:
        find_method: Function that returns the API object's method.
        question: Description of the request, for errors.
        arguments: Arguments of the method.

    Raises:
        ConfigurationError: The API's description does not allow an argument.
        ClusterLookupError: The program's own API object fails.
    """
    try:
        return find_method()(**arguments)
    except TypeError as error:  # the library's error for a malformed name
        raise ConfigurationError(f"cannot ask for {question}: {error}. Correct the name") from error
    except Exception as error:
        raise _failed(error, question) from error


def execute(request: Any, question: str, policy: LookupPolicy) -> Mapping[str, Any]:
    """Make a request of an API object; retry it after temporary errors.

    Args:
        request: Request that a method of the API object returned.
        question: Description of the request, for errors.
        policy: Limits of its requests.

    Returns:
        The reply.

    Raises:
        ClusterLookupDeniedError: The credentials are invalid, or lack a permission.
        ClusterLookupUnavailableError: The service does not answer.
        ClusterLookupError: The requested resource does not exist, or the reply is malformed.
    """

    def attempt() -> Mapping[str, Any]:
        with _Translation(question):
            reply = request.execute()
        if not isinstance(reply, Mapping):
            raise ClusterLookupError(f"{question}: the reply is a {type(reply).__name__}, not an object")
        return reply

    return policy.ask(question, attempt)


def _default_credentials() -> object:
    auth: Any = importlib.import_module("google.auth")
    exceptions: Any = importlib.import_module("google.auth.exceptions")
    try:
        return auth.default(scopes=_SCOPES)[0]
    except exceptions.DefaultCredentialsError as error:
        raise ClusterLookupDeniedError(
            f"no credentials for Google's APIs: {error} Pass credentials=..., set "
            "GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login"
        ) from error
    except exceptions.GoogleAuthError as error:
        raise ClusterLookupUnavailableError(f"cannot get credentials for Google's APIs: {error}") from error


class _Translation:
    """Translates errors of API objects into `Busy` or dmesh's errors, also without the client libraries."""

    def __init__(self, question: str) -> None:
        self._question = question

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(
            error, Busy | ClusterLookupError | MissingExtraError
        ):
            return
        names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
        if "googleapiclient.errors.HttpError" in names:
            raise _judge(error, self._question) from error
        if "google.auth.exceptions.TransportError" in names or isinstance(error, OSError):
            raise Busy(f"no connection: {error}") from error
        if "google.auth.exceptions.GoogleAuthError" in names:
            raise ClusterLookupDeniedError(
                f"cannot get {self._question}: the credentials do not work: {error.args[0]}. Renew them"
            ) from error
        raise _failed(error, self._question) from error


def _failed(error: Exception, question: str) -> ClusterLookupError:
    """Return the error for an unexpected exception of an API object."""
    return ClusterLookupError(
        f"cannot get {question}: the API object raised {type(error).__name__}: {str(error)[:300]}. Check the "
        "arguments of the resolver, service among them"
    )


def _judge(error: Any, question: str) -> Exception:
    status = int(error.resp.status)
    content = error.content.decode("utf-8", "replace") if isinstance(error.content, bytes) else ""
    if status == 429 or status >= 500 or (status == 403 and any(limit in content for limit in _RATE_LIMITS)):
        return Busy(f"it answered {status}", parse_retry_after(error.resp.get("retry-after")))
    said = " ".join(str(error.reason).split())[:300]
    if status == 401:
        return ClusterLookupDeniedError(
            f"cannot get {question}: the credentials are not accepted (401 {said}). Renew them, for example "
            "with gcloud auth application-default login"
        )
    if status == 403:
        return ClusterLookupDeniedError(
            f"cannot get {question}: the credentials lack a permission (403 {said}). Grant their account a "
            "role that has it, such as roles/tpu.viewer or roles/compute.viewer, and enable the API for the "
            "project"
        )
    if status == 404:
        return ClusterLookupError(
            f"cannot get {question}: it does not exist (404 {said}). Check the name, the zone and the project"
        )
    return ClusterLookupError(f"cannot get {question}: {status} {said}")
