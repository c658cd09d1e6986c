"""Errors and retries."""

import json
import re
import time
from pathlib import Path

import e2b
import jiffy
import pytest
from jiffy import error_codes, errors
from servers import scripted

PAGE = Path(__file__).parents[4] / "docs" / "troubleshooting.md"
KEY = "e2b_" + "1" * 40
CREATED = b'{"templateID":"base","sandboxID":"a","clientID":"jiffy","envdVersion":"0.6.13","domain":null}'
BUSY = b'{"code":503,"message":"the host has no capacity","error_code":"host_busy"}'


def test_every_error_code_has_a_class():
    listed = set(re.findall(r"^- `(\w+)` \(", PAGE.read_text().partition("\n## Error codes\n")[2], re.M))
    assert len(listed) > 50 and set(error_codes.CLASSES) == listed
    of_e2b = tuple(kind for kind in vars(e2b.exceptions).values() if isinstance(kind, type))
    for code, kind in error_codes.CLASSES.items():
        error = kind("text", status_code=400)
        assert error.error_code == code and isinstance(error, of_e2b) and str(error) == "400: text"


async def test_an_error_has_a_code_and_a_request_id(sdk):
    with pytest.raises(error_codes.TemplateNotFoundError) as failure:
        await sdk(sdk.Sandbox.create, "no-such-template")
    error = failure.value
    assert isinstance(error, e2b.NotFoundException)
    assert (error.status_code, error.error_code) == (404, "template_not_found")
    assert error.request_id and "no-such-template" in error.message


async def test_an_unknown_error_code_has_the_class_of_its_status(sdk):
    for status, kind in ((429, errors.TooManyRequestsError), (418, errors.OtherError)):
        with scripted((status, {"Should-Retry": "false"}, b'{"message":"m","error_code":"of_the_future"}')) as (url, _):
            with pytest.raises(kind) as failure:
                await sdk(sdk.Host.status, api_url=url, api_key=KEY)
        assert failure.value.error_code == "of_the_future"


async def test_a_taken_name_is_an_error(create, unique):
    await create(name=unique)
    with pytest.raises(error_codes.NameTakenError) as failure:
        await create(name=unique)
    assert failure.value.status_code == 409


async def test_a_create_is_repeated_with_its_key(sdk):
    with scripted(None, (504, {}, b"{}"), (201, {}, CREATED)) as (url, requests):
        sandbox = await sdk(sdk.Sandbox.create, api_url=url, api_key=KEY)
    assert sandbox.sandbox_id == "a" and len(requests) == 3
    assert len({headers["idempotency-key"] for _, _, headers, _ in requests}) == 1


async def test_an_image_is_imported_before_the_create(sdk):
    statuses = [
        {"status": "building", "logs": ["layer 1 of 2\n"]},
        {"status": "ready", "logs": ["layer 2 of 2\n"]},
    ]
    answers = [(202, {}, json.dumps(body).encode()) for body in ({"templateID": "t", "buildID": "b"}, {}, *statuses)]
    log = []
    with scripted(*answers, (201, {}, CREATED)) as (url, requests):
        await sdk(sdk.Sandbox.create, image="library/Python:3.12", on_image_log=log.append, api_url=url, api_key=KEY)
    assert log == ["layer 1 of 2", "layer 2 of 2"]
    paths = [path for _, path, _, _ in requests]
    status = "/templates/t/builds/b/status?logsOffset="
    assert paths == ["/v3/templates", "/v2/templates/t/builds/b", status + "0", status + "1", "/v2/sandboxes"]
    name = json.loads(requests[0][3])["name"]
    assert re.fullmatch("img--ython-3.12-[0-9a-f]{8}", name)
    assert json.loads(requests[1][3])["fromImage"] == "library/Python:3.12"
    assert json.loads(requests[4][3])["templateID"] == name


async def test_an_image_that_cannot_be_imported_is_an_error(sdk):
    # Registries in private networks need a permission of the host's owner.
    with pytest.raises(e2b.BuildException, match=r"cannot import image 127\.0\.0\.1:1/absent: .*127\.0\.0\.1"):
        await sdk(sdk.Sandbox.create, image="127.0.0.1:1/absent")
    with pytest.raises(e2b.InvalidArgumentException, match="either template or image"):
        await sdk(sdk.Sandbox.create, "base", image="python:3.12")


async def test_retry_after_is_the_time_before_a_retry(sdk):
    # A rejected fork was not executed.
    with scripted((503, {"Retry-After": "1"}, BUSY), (201, {}, b"[]")) as (url, requests):
        start = time.monotonic()
        assert await sdk(sdk.Sandbox.fork, "a", api_url=url, api_key=KEY) == []
    assert 1 <= time.monotonic() - start < 10 and len(requests) == 2


async def test_should_retry_false_prevents_a_retry(sdk):
    with scripted((503, {"Should-Retry": "false"}, BUSY)) as (url, requests):
        with pytest.raises(error_codes.HostBusyError) as failure:
            await sdk(sdk.Sandbox.create, api_url=url, api_key=KEY)
    assert isinstance(failure.value, e2b.ServiceBusyException) and len(requests) == 1


async def test_a_fork_is_not_repeated_after_a_lost_connection(sdk):
    with scripted(None) as (url, requests):
        with pytest.raises(jiffy.UnreachableError):
            await sdk(sdk.Sandbox.fork, "a", api_url=url, api_key=KEY)
    assert len(requests) == 1


async def test_a_read_is_repeated_after_a_lost_connection(sdk):
    with scripted(None, None, (200, {}, b"[]")) as (url, requests):
        assert await sdk(sdk.Host.engines, api_url=url, api_key=KEY) == []
    assert len(requests) == 3


async def test_a_fork_is_not_repeated_after_a_bad_gateway(sdk):
    with scripted((502, {}, b"{}")) as (url, requests):
        with pytest.raises(errors.OtherError):
            await sdk(sdk.Sandbox.fork, "a", api_url=url, api_key=KEY)
    assert len(requests) == 1


async def test_a_response_that_cannot_be_parsed_is_not_repeated(sdk):
    with scripted((200, {}, b"{}")) as (url, requests):
        with pytest.raises(KeyError):
            await sdk(sdk.Snapshot.get, "a", api_url=url, api_key=KEY)
    assert len(requests) == 1
