"""Signed links to one file, which require no token."""

import httpx
import pytest


@pytest.mark.parametrize("user", [None, "root"])
async def test_a_signed_link_downloads_one_file(sdk, sandbox, web, unique, user):
    path = f"/tmp/{unique} ünï&?"
    await sdk(sandbox.files.write, path, "for everybody", user=user)
    answer = await web.get(sandbox.download_url(path, user=user))
    assert (answer.status_code, answer.text) == (200, "for everybody")


async def test_a_signed_link_uploads_one_file(sdk, sandbox, web, unique):
    path = f"/tmp/{unique}"
    answer = await web.post(sandbox.upload_url(path), files={"file": ("whatever.txt", b"from a browser")})
    assert answer.status_code == 200 and answer.json()[0]["path"] == path
    assert await sdk(sandbox.files.read, path) == "from a browser"


async def test_a_link_is_valid_only_for_its_sandbox(sdk, sandbox, create, web, unique):
    path = f"/tmp/{unique}"
    other = await create()
    await sdk(sandbox.files.write, path, "mine")
    await sdk(other.files.write, path, "the other's")
    assert (await web.get(sandbox.download_url(path))).text == "mine"
    assert (await web.get(other.download_url(path))).text == "the other's"


async def test_a_link_permits_only_its_operation_and_path(sdk, sandbox, web, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "signed")
    link = httpx.URL(sandbox.download_url(path, use_signature_expiration=60))
    assert (await web.get(link)).text == "signed"
    for changed in (
        {"path": "/etc/passwd"},
        {"username": "root"},
        {"signature": "v1_AAAA"},
        {"signature_expiration": str(int(link.params["signature_expiration"]) + 60)},
    ):
        assert (await web.get(link.copy_merge_params(changed))).status_code in (401, 404, 502), changed
    assert (await web.post(link, files={"file": ("x", b"overwritten")})).status_code in (401, 404, 502)
    assert await sdk(sandbox.files.read, path) == "signed"


async def test_a_link_expires(sdk, sandbox, web, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "signed")
    assert (await web.get(sandbox.download_url(path, use_signature_expiration=-1))).status_code == 401
