"""The checks on `explorer=vllm_server`. Whether the server is there, the explorer finds out."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from trinity_sync.config.problems import Get, Problem
from trinity_sync.config.vllm_checks import sampling_problems

_SUCH_AS = "such as explorer.url=http://127.0.0.1:8000"


def check_vllm_server(get: Get) -> Iterator[Problem]:
    """That a server is named, and is asked for what it can."""
    if get("explorer.kind") != "vllm_server":
        return
    if (wrong := _wrong_url(get("explorer.url"))) is not None:
        yield Problem("explorer.url", wrong)
    replicas = get("explorer.replicas")
    if replicas > 1:
        yield Problem("explorer.replicas", f"is {replicas}, but explorer.url names one server; set it to 1")
    if get("sync.mode") == "nccl":
        yield Problem(
            "sync",
            "is nccl, in whose rounds a server takes no part; choose sync=memory, or sync=checkpoint",
        )
    yield from sampling_problems(get)


def _wrong_url(url: str | None) -> str | None:
    if url is None:
        return f"is null; name the vLLM server, {_SUCH_AS}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is {url}: {error}; name the vLLM server, {_SUCH_AS}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"is {url}, which is no address of a server; name one {_SUCH_AS}"
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        return f"is {url}; name the server's address only, {_SUCH_AS}"
    return None
