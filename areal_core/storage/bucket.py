"""Object store in an S3 bucket. The only user of fsspec and s3fs, which take long to import.

Each request is retried by itself (`Attempt`); the retries of botocore and s3fs are off. So a transfer repeats only the
parts that failed, even after a long server outage. s3fs would repeat whole files. It would also mix two contents of an
object that is replaced during the read. Each object stores its CRC-32 in its metadata, because radosgw and other
servers do not store botocore's checksums.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import aiohttp
import fsspec
from botocore import exceptions
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync

from areal_core.storage import folder
from areal_core.storage.patience import Attempt

T = TypeVar("T")
PART_BYTES = 8 * 2**20  # at most 2 * PART_BYTES * _PARALLEL of a file are in memory
_PARALLEL = 8  # parts in transfer at once
_MOST_PARTS = 10_000  # S3's limit per object
_MOST_DELETED = 1000  # S3's limit per request
_READS = 3  # tries to read an object that is replaced meanwhile, or arrives damaged
_OPEN_S = 5.0  # per request: finds a wrong endpoint before a run starts; a live one responds sooner
_REQUEST_S = 300.0
_CRC = "crc32"  # key in an object's metadata
_OPTIONS: dict[str, Any] = {
    "use_listings_cache": False,
    "skip_instance_cache": True,
    "config_kwargs": {"connect_timeout": 3, "read_timeout": 30, "retries": {"total_max_attempts": 1}},
}
_TRANSIENT = (
    TimeoutError,
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.IncompleteReadError,
    ResponseParserError,  # a proxy's page instead of a response
    exceptions.CredentialRetrievalError,
    exceptions.MetadataRetrievalError,
    aiohttp.ClientError,
)
_TRANSIENT_CODES = frozenset(
    (
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "InternalError",
        "ServiceUnavailable",
        "OperationAborted",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
    )
)
_CHANGED = ("PreconditionFailed", "412", "NoSuchKey", "404")  # the object was replaced or deleted
_CREDENTIALS = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "InvalidToken", "ExpiredToken")


class Bucket:
    """S3 backend of `Storage`; paths are bucket/key. `endpoint_url` is for servers other than Amazon's."""

    errors: tuple[type[Exception], ...] = (
        OSError,
        ValueError,  # an endpoint that is not a URL
        exceptions.BotoCoreError,
        exceptions.ClientError,
        ResponseParserError,
        aiohttp.ClientError,
    )

    def __init__(self, endpoint_url: str | None) -> None:
        self._fs: Any = fsspec.filesystem("s3", endpoint_url=endpoint_url, **_OPTIONS)
        self._fs.retries = 1
        self._request_s = _OPEN_S

    def opened(self) -> None:
        """Allow slow servers more time per request from now on."""
        self._request_s = _REQUEST_S

    def transient(self, error: Exception) -> bool:
        if response := _response(error):
            status = response["ResponseMetadata"]["HTTPStatusCode"]
            return _code(error) in _TRANSIENT_CODES or status == 429 or (status >= 500 and status != 501)
        if isinstance(error, exceptions.SSLError):
            return False
        return isinstance(error, _TRANSIENT) or (isinstance(error, OSError) and error.errno in folder.TRANSIENT)

    def reason(self, error: Exception) -> str:
        if response := _response(error):
            code, message = _code(error), response["Error"].get("Message")  # radosgw sends none
            if code in ("NoSuchKey", "404"):
                return "it does not exist"
            if code in _CREDENTIALS:
                return f"the credentials are wrong ({code})"
            return f"{message} ({code})" if message else code
        if isinstance(error, TimeoutError):
            return "no response in time"
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return " ".join(str(error).split()) or type(error).__name__

    def make(self, bucket: str) -> None:
        """Create the bucket if it does not exist."""
        try:
            self._call("head_bucket", bucket)
        except PermissionError:
            pass  # some credentials allow writes but no look-up: the probe decides
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process has created it
                self._call("create_bucket", bucket)

    def put_file(self, local: Path, path: str, attempt: Attempt) -> None:
        size, checksum = _checksum(local)
        if size > PART_BYTES:
            self._upload(local, path, size, {_CRC: checksum}, attempt)
        else:
            attempt(lambda: self.put_bytes(path, local.read_bytes()))

    def put_bytes(self, path: str, data: bytes) -> None:
        self._call("put_object", path, Body=data, Metadata={_CRC: _hex(zlib.crc32(data))})

    def put_if_unchanged(self, path: str, data: bytes, etag: str | None) -> str | None:
        """Replace the object whose ETag is `etag`; returns the new ETag, or None if the ETag differs."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            put = self._call("put_object", path, Body=data, Metadata={_CRC: _hex(zlib.crc32(data))}, **condition)
        except self.errors as error:
            if _code(error) not in _CHANGED:
                raise
            return None
        return _etag(put)

    def get_with_etag(self, path: str) -> tuple[bytes, str]:
        """An object and its ETag, without a checksum test, so that a damaged object can be replaced."""
        response, data = self._read(path)
        return data, _etag(response)

    def get_file(self, path: str, local: Path, attempt: Attempt) -> None:
        _whole(lambda: self._download(path, local, attempt))

    def get_bytes(self, path: str) -> bytes:
        def read() -> bytes:
            response, data = self._read(path)
            _check(response, _hex(zlib.crc32(data)))
            return data

        return _whole(read)

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        try:
            return self._read(path, Range=f"bytes={start}-{stop - 1}")[1]
        except OSError as error:
            if _code(error) != "InvalidRange":  # the object ends before `start`
                raise
            return b""

    def sizes(self, path: str) -> dict[str, int]:
        return {name: int(entry["size"]) for name, entry in self._found(path).items()}

    def write_times(self, path: str) -> dict[str, float]:
        return {name: entry["LastModified"].timestamp() for name, entry in self._found(path).items()}

    def _found(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self._fs.find(path, detail=True)
        return {name: entry for name, entry in found.items() if name.startswith(f"{path}/")}

    def delete(self, path: str) -> None:
        keys = [self._place(name)["Key"] for name in (path, *self.sizes(path))]
        for first in range(0, len(keys), _MOST_DELETED):
            objects = [{"Key": key} for key in keys[first : first + _MOST_DELETED]]
            response = self._call("delete_objects", path, Delete={"Objects": objects, "Quiet": True})
            if refused := response.get("Errors"):
                raise exceptions.ClientError({**response, "Error": refused[0]}, "DeleteObjects")

    def _upload(self, local: Path, path: str, size: int, metadata: dict[str, str], attempt: Attempt) -> None:
        upload = attempt(lambda: self._call("create_multipart_upload", path, Metadata=metadata))["UploadId"]
        length = max(PART_BYTES, -(-size // _MOST_PARTS))

        def send(number: int) -> dict[str, Any]:
            with local.open("rb") as file:
                file.seek((number - 1) * length)
                data = file.read(length)
            sent = attempt(lambda: self._call("upload_part", path, UploadId=upload, PartNumber=number, Body=data))
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            parts = {"Parts": _parallel(send, range(1, -(-size // length) + 1))}
            attempt(lambda: self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload=parts))
        except BaseException:
            with contextlib.suppress(*self.errors):  # leftover parts are invisible and only take space
                self._call("abort_multipart_upload", path, UploadId=upload)
            raise

    def _download(self, path: str, local: Path, attempt: Attempt) -> None:
        about = attempt(lambda: self._call("head_object", path))
        size = int(about["ContentLength"])
        with local.open("wb") as file:
            file.truncate(size)

            def fetch(start: int) -> None:
                stop = min(start + PART_BYTES, size)
                span = {"Range": f"bytes={start}-{stop - 1}", "IfMatch": about["ETag"]}
                attempt(lambda: _write(file.fileno(), self._read(path, **span)[1], start))

            _parallel(fetch, range(0, size, PART_BYTES))
        _check(about, _checksum(local)[1])

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        return self._fs.call_s3(method, **self._place(path), **arguments, timeout=self._request_s)

    def _read(self, path: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """The response to a get_object request, and its complete body."""

        async def read() -> tuple[dict[str, Any], bytes]:
            response = await self._fs._call_s3("get_object", **self._place(path), **arguments)
            async with response["Body"] as body:
                data = await body.read()
            if len(data) != response["ContentLength"]:
                raise exceptions.IncompleteReadError(actual_bytes=len(data), expected_bytes=response["ContentLength"])
            return response, data

        return cast(tuple[dict[str, Any], bytes], sync(self._fs.loop, read, timeout=self._request_s))

    def _place(self, path: str) -> dict[str, str]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key} if key else {"Bucket": bucket}


def _response(error: Exception) -> dict[str, Any] | None:
    """The server's response behind an error of botocore or s3fs; None if there is none."""
    return getattr(error, "response", None) or getattr(error.__cause__, "response", None)


def _code(error: Exception) -> str:
    response = _response(error)
    return str(response["Error"].get("Code") or response["ResponseMetadata"]["HTTPStatusCode"]) if response else ""


def _etag(response: dict[str, Any]) -> str:
    """An ETag without its quotes: S3 accepts both forms, older radosgw only this one."""
    return response["ETag"].strip('"')


def _whole(read: Callable[[], T]) -> T:
    """Call `read`, and repeat it if the object was replaced meanwhile, or arrived damaged."""
    for _ in range(_READS - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.EBADMSG and _code(error) != "PreconditionFailed":
                raise
    return read()


def _parallel(work: Callable[[int], T], items: Iterable[int]) -> list[T]:
    """Results of `work`, in the order of `items`; the first failure cancels items that have not started."""
    pool = ThreadPoolExecutor(_PARALLEL, "transfer")
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _write(descriptor: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written


def _checksum(local: Path) -> tuple[int, str]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with local.open("rb") as file:
        while block := file.read(2**20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, _hex(crc)


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _check(response: dict[str, Any], found: str) -> None:
    """Raise OSError if the checksum of an object differs from the one it was stored with.
    Objects of other programs may have no checksum."""
    wanted = response["Metadata"].get(_CRC, found)
    if found != wanted:
        raise OSError(errno.EBADMSG, f"it is damaged: its CRC-32 is {found}, expected {wanted}")
