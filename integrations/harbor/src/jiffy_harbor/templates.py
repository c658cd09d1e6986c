"""Templates of tasks: images of the host where they exist, otherwise images of registries."""

from __future__ import annotations

import re
from pathlib import Path

import jiffy
from jiffy import AsyncTemplate

# Without these instructions, the builder of `e2b` selects its own user and directory.
USER = re.compile(r"^[ \t]*USER[ \t]", re.IGNORECASE | re.MULTILINE)
WORKDIR = re.compile(r"^[ \t]*WORKDIR[ \t]", re.IGNORECASE | re.MULTILINE)
FROM = re.compile(r"^[ \t]*FROM[ \t]+(?:--\S+[ \t]+)*(\S+)", re.IGNORECASE | re.MULTILINE)


async def template_of(image: str, images: dict[str, str]) -> str | None:
    """Returns the template of the host that replaces an image, as `FROM` in `jiffy template build`."""
    if image in images:
        return images[image]
    if "/" in image or "@" in image:
        return None
    return image if await AsyncTemplate.exists(image) else None


async def build(
    name: str,
    directory: Path,
    docker_image: str | None,
    images: dict[str, str],
    *,
    cpu_count: int | None,
    memory_mb: int | None,
    force: bool,
) -> None:
    """Builds the template of a task from its image or Dockerfile.

    :raises RuntimeError: If the build fails. The message has the end of its log.
    """
    template = AsyncTemplate(file_context_path=directory)
    if docker_image is None:
        text = (directory / "Dockerfile").read_text()
        builder = template.from_dockerfile(text)
        image, has_user, has_workdir = FROM.findall(text)[-1], USER.search(text), WORKDIR.search(text)
    else:
        builder = template.from_image(docker_image)
        image, has_user, has_workdir = docker_image, None, None
    local = await template_of(image, images)
    if local is not None:
        builder = template.from_template(local)
    if not has_user:
        builder = builder.set_user("root")
    if not has_workdir:
        builder = builder.set_workdir("/")
    log: list[str] = []
    try:
        await AsyncTemplate.build(
            builder,
            name,
            cpu_count=cpu_count or 1,
            memory_mb=memory_mb or 1024,
            skip_cache=force,
            on_build_logs=lambda entry: log.append(entry.message),
        )
    except jiffy.BuildException as error:
        raise RuntimeError(
            f"cannot build template {name} from {image}: {error}; a host without internet requires a template "
            f"of the image (option `images`)\n" + "\n".join(log[-20:])
        ) from error
