"""Volumes and their files, by the unmodified package."""

import io
import uuid

import pytest
from e2b import AsyncVolume, Volume
from e2b.exceptions import SandboxException, VolumeException, VolumeNotFoundException, VolumePathNotFoundException


@pytest.fixture
def volumes(sdk):
    """Returns the class for volumes of the package under test."""
    return AsyncVolume if not sdk.blocking else Volume


async def test_files_of_a_volume_are_written_listed_read_and_removed(sdk, volumes):
    name = f"data-{uuid.uuid4().hex[:8]}"
    volume = await sdk(volumes.create, name)
    try:
        assert volume.name == name
        assert name in [found.name for found in await sdk(volumes.list)]
        again = await sdk(volumes.connect, volume.volume_id)
        assert again.token == volume.token
        made = await sdk(volume.make_dir, "/a/b", mode=0o750, uid=1000, force=True)
        assert (made.path, made.mode, made.uid) == ("/a/b", 0o750, 1000)
        written = await sdk(volume.write_file, "/a/b/text", "grüße")
        assert (written.size, written.name) == (7, "text")
        assert await sdk(volume.read_file, "/a/b/text") == "grüße"
        content = bytes(range(256)) * 8192
        await sdk(volume.write_file, "/a/large", io.BytesIO(content))
        assert await sdk(volume.read_file, "/a/large", format="bytes") == content
        listed = await sdk(volume.list, "/", depth=3)
        assert [entry.path for entry in listed] == ["/a", "/a/b", "/a/b/text", "/a/large"]
        changed = await sdk(volume.update_metadata, "/a/large", mode=0o600)
        assert changed.mode == 0o600
        await sdk(volume.remove, "/a")
        assert await sdk(volume.exists, "/a/large") is False
        with pytest.raises(VolumePathNotFoundException):
            await sdk(volume.read_file, "/a/large")
        with pytest.raises(VolumeException):
            await sdk(volume.make_dir, "/../x")
    finally:
        assert await sdk(volumes.destroy, volume.volume_id) is True
    assert await sdk(volumes.destroy, volume.volume_id) is False
    with pytest.raises(VolumeNotFoundException):
        await sdk(volumes.connect, volume.volume_id)


async def test_a_sandbox_mounts_a_volume_and_its_files_outlive_the_sandbox(sdk, volumes, create):
    volume = await sdk(volumes.create, f"data-{uuid.uuid4().hex[:8]}")
    try:
        await sdk(volume.write_file, "/from-client", "client")
        try:
            sandbox = await create(volume_mounts={"/data": volume})
        except SandboxException as error:
            # Sandboxes on gVisor cannot mount volumes.
            assert "gvisor" in str(error)
            return
        assert await sdk(sandbox.files.read, "/data/from-client") == "client"
        await sdk(sandbox.files.write, "/data/from-sandbox", "sandbox")
        info = await sdk(sandbox.get_info)
        assert info.volume_mounts == [{"name": volume.name, "path": "/data"}]
        with pytest.raises(VolumeException, match="mounted"):
            await sdk(volumes.destroy, volume.volume_id)
        await sdk(sandbox.kill)
        assert await sdk(volume.read_file, "/from-sandbox") == "sandbox"
    finally:
        await sdk(volumes.destroy, volume.volume_id)
