"""Files are written, read, listed, moved and removed; every method of uploading works."""

import hashlib
import io
import random

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, NotEnoughSpaceException

# Content of large files. It is the same in every run.
BYTES = random.Random(1).randbytes(3_000_000)


async def test_text_is_read_as_it_was_written(sdk, sandbox, unique):
    text = "zeile\r\nünï🦀\x00end"
    info = await sdk(sandbox.files.write, f"/tmp/{unique}", text)
    assert (info.path, info.name, info.type) == (f"/tmp/{unique}", unique, FileType.FILE)
    assert await sdk(sandbox.files.read, f"/tmp/{unique}") == text


@pytest.mark.parametrize(
    "way",
    [{}, {"use_octet_stream": True}, {"gzip": True}],
    ids=["multipart", "octet-stream", "gzip"],
)
async def test_bytes_arrive_completely_with_every_upload_method(sdk, sandbox, unique, way):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, BYTES, **way)
    assert bytes(await sdk(sandbox.files.read, path, format="bytes")) == BYTES
    assert bytes(await sdk(sandbox.files.read, path, format="bytes", gzip=True)) == BYTES
    digest = (await sdk(sandbox.commands.run, f"sha256sum {path}")).stdout.split()[0]
    assert digest == hashlib.sha256(BYTES).hexdigest()


async def test_uploads_and_downloads_can_be_streamed(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    pieces = [BYTES[i : i + 70_000] for i in range(0, len(BYTES), 70_000)]
    await sdk(sandbox.files.write, path, sdk.body(pieces))
    got = await sdk.chunks(await sdk(sandbox.files.read, path, format="stream"))
    assert len(got) > 1
    assert b"".join(got) == BYTES


async def test_an_open_file_can_be_uploaded(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}", io.BytesIO(b"from a file"))
    assert await sdk(sandbox.files.read, f"/tmp/{unique}") == "from a file"


async def test_an_empty_file_exists_and_is_empty(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "")
    assert await sdk(sandbox.files.read, path) == ""
    assert bytes(await sdk(sandbox.files.read, path, format="bytes")) == b""
    assert await sdk.chunks(await sdk(sandbox.files.read, path, format="stream")) == []


@pytest.mark.parametrize("octet_stream", [False, True], ids=["multipart", "octet-stream"])
async def test_several_files_are_uploaded_to_their_own_paths(sdk, sandbox, unique, octet_stream):
    files = [{"path": f"/tmp/{unique}/deep/{n}/name {n} é.txt", "data": f"content {n}"} for n in range(30)]
    infos = await sdk(sandbox.files.write_files, files, use_octet_stream=octet_stream)
    assert [info.path for info in infos] == [file["path"] for file in files]
    for file in files[::7]:
        assert await sdk(sandbox.files.read, file["path"]) == file["data"]


async def test_writing_creates_directories_and_overwrites_files(sdk, sandbox, unique):
    path = f"/home/user/{unique}/a/b/c.txt"
    await sdk(sandbox.files.write, path, "a much longer first version")
    await sdk(sandbox.files.write, path, "short")
    assert await sdk(sandbox.files.read, path) == "short"
    owner = await sdk(sandbox.commands.run, f"stat -c %U /home/user/{unique} /home/user/{unique}/a/b/c.txt")
    assert owner.stdout.split() == ["user", "user"]


async def test_paths_are_relative_to_the_home_directory_of_the_user(sdk, sandbox, unique):
    await sdk(sandbox.files.write, unique, "mine")
    assert await sdk(sandbox.files.read, f"/home/user/{unique}") == "mine"
    await sdk(sandbox.files.write, f"~/{unique}", "roots", user="root")
    assert await sdk(sandbox.files.read, f"/root/{unique}", user="root") == "roots"


async def test_a_missing_file_is_not_found(sdk, sandbox, unique):
    for call in (
        lambda: sdk(sandbox.files.read, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.read, f"/tmp/{unique}", format="stream"),
        lambda: sdk(sandbox.files.get_info, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.list, f"/tmp/{unique}"),
        lambda: sdk(sandbox.files.rename, f"/tmp/{unique}", f"/tmp/{unique}.new"),
    ):
        with pytest.raises(FileNotFoundException, match=unique):
            await call()
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}") is False


async def test_directories_and_files_are_distinguished(sdk, sandbox, unique):
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.read, "/tmp")
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.write, "/tmp", "x")
    await sdk(sandbox.files.write, f"/tmp/{unique}", "x")
    with pytest.raises(InvalidArgumentException):
        await sdk(sandbox.files.list, f"/tmp/{unique}")


async def test_file_information_matches_the_file_system(sdk, sandbox, unique):
    path = f"/tmp/{unique}"
    await sdk(sandbox.files.write, path, "12345")
    await sdk(sandbox.commands.run, f"chmod 640 {path}; touch -d @1700000000 {path}; ln -s {path} {path}.link")
    info = await sdk(sandbox.files.get_info, path)
    assert (info.name, info.path, info.type, info.size) == (unique, path, FileType.FILE, 5)
    assert (info.owner, info.group, info.permissions) == ("user", "user", "-rw-r-----")
    assert info.mode & 0o777 == 0o640
    assert info.modified_time.timestamp() == 1_700_000_000
    assert info.symlink_target is None
    link = await sdk(sandbox.files.get_info, f"{path}.link")
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, path)
    assert (await sdk(sandbox.files.get_info, "/tmp")).type is FileType.DIR


async def test_a_listing_has_the_requested_depth(sdk, sandbox, unique):
    top = f"/tmp/{unique}"
    await sdk(sandbox.commands.run, f"mkdir -p {top}/a/b && touch {top}/1 {top}/a/2 {top}/a/b/3 && ln -s /etc {top}/link")
    names = lambda entries: {entry.path.removeprefix(top + "/"): entry.type.value for entry in entries}
    assert names(await sdk(sandbox.files.list, top)) == {"a": "dir", "1": "file", "link": "symlink"}
    assert set(names(await sdk(sandbox.files.list, top, depth=2))) == {"a", "1", "link", "a/2", "a/b"}
    assert set(names(await sdk(sandbox.files.list, top, depth=3))) == {"a", "1", "link", "a/2", "a/b", "a/b/3"}


async def test_renaming_moves_a_file_and_returns_its_new_path(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}/old", "content")
    info = await sdk(sandbox.files.rename, f"/tmp/{unique}/old", f"/tmp/{unique}/new")
    assert (info.path, info.name) == (f"/tmp/{unique}/new", "new")
    assert await sdk(sandbox.files.read, f"/tmp/{unique}/new") == "content"
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}/old") is False


async def test_removal_is_recursive_and_can_be_repeated(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}/a/b", "x")
    await sdk(sandbox.files.remove, f"/tmp/{unique}")
    assert await sdk(sandbox.files.exists, f"/tmp/{unique}") is False
    await sdk(sandbox.files.remove, f"/tmp/{unique}")


async def test_creating_a_directory_reports_whether_it_existed(sdk, sandbox, unique):
    assert await sdk(sandbox.files.make_dir, f"/tmp/{unique}/x/y") is True
    assert await sdk(sandbox.files.make_dir, f"/tmp/{unique}/x/y") is False
    assert (await sdk(sandbox.files.get_info, f"/tmp/{unique}/x/y")).owner == "user"


async def test_metadata_is_stored_with_its_file(sdk, sandbox, unique):
    path = f"/home/user/{unique}"
    written = await sdk(sandbox.files.write, path, "x", metadata={"origin": "test", "step": "2"})
    assert written.metadata == {"origin": "test", "step": "2"}
    assert (await sdk(sandbox.files.get_info, path)).metadata == {"origin": "test", "step": "2"}


async def test_files_belong_to_the_user_of_the_request(sdk, sandbox, unique):
    await sdk(sandbox.files.write, f"/tmp/{unique}", "secret", user="root")
    assert (await sdk(sandbox.files.get_info, f"/tmp/{unique}")).owner == "root"


async def test_a_file_larger_than_the_disk_is_rejected_with_its_reason(sdk, sandbox, unique):
    await sdk(sandbox.commands.run, f"mkdir /tmp/{unique} && mount -t tmpfs -o size=1m none /tmp/{unique} && chmod 777 /tmp/{unique}", user="root")
    with pytest.raises(NotEnoughSpaceException):
        await sdk(sandbox.files.write, f"/tmp/{unique}/big", BYTES)
    await sdk(sandbox.commands.run, f"umount /tmp/{unique}", user="root")
