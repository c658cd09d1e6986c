"""Containers in sandboxes."""

from sandbox import Failed, Sandbox

# An image with one static program, because no registry is reachable from here.
IMAGE = r"""
mkdir -p image/www && cd image && cp /bin/busybox . && echo "it is served" >www/index.html
printf 'FROM scratch\nCOPY busybox /bin/busybox\nCOPY www /www\nCMD ["/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/www"]\n' >Dockerfile
"""
# Sends requests to a published port until it responds.
REQUEST_SCRIPT = "for i in $(seq 100); do curl -sf --max-time 5 http://127.0.0.1:8080/ && exit 0; sleep 0.1; done; exit 1"


def check_published_port(sandbox, user):
    """Checks that the container's server answers on the published port."""
    response = sandbox.sh(REQUEST_SCRIPT, user=user)
    if response != "it is served":
        raise Failed(f"the published port answered {response!r}")


# gVisor has neither nftables nor MASQUERADE: use the settings of the template `docker`.
DOCKERD = {
    "microvm": "nohup dockerd",
    "gvisor": "echo 1 >/proc/sys/net/ipv4/ip_forward; "
              "address=$(ip -4 -o address show dev eth0 | sed -n 's/.* inet \\([0-9.]*\\).*/\\1/p'); "
              "for protocol in tcp udp; do "
              "iptables-legacy -t nat -A POSTROUTING -o eth0 -p $protocol -j SNAT --to-source $address; done; "
              "nohup dockerd --iptables=false --ip6tables=false",
}


def docker(engine):
    """dockerd builds an image and runs it with a published port, which also works in forks (on microVMs)."""
    sandbox = Sandbox.create(memory="1GiB")
    sandbox.sh(DOCKERD[engine] + " >/var/log/dockerd.log 2>&1 </dev/null & "
               "for i in $(seq 300); do docker info >/dev/null 2>&1 && exit 0; sleep 0.1; done; tail -40 /var/log/dockerd.log; exit 1")
    driver = sandbox.sh("docker info --format '{{.Driver}}'")
    if driver != "overlay2":
        raise Failed(f"the storage driver is {driver}")
    sandbox.sh(IMAGE + "docker build -q -t served . && docker run -d --name served -p 8080:80 served")
    check_published_port(sandbox, "root")
    # gVisor does not save the forwarding table of a bridge.
    if engine == "microvm":
        child = sandbox.fork(1)[0]
        check_published_port(child, "root")
        child.sh("docker restart -t 1 served")
        check_published_port(child, "root")
        child.check_kernel()
        child.remove()
    sandbox.sh("docker exec served /bin/busybox true && docker rm -f served && docker rmi -f served")
    sandbox.check_kernel()


def podman(engine):
    """podman builds and runs the image as an unprivileged user; on gVisor as root in the sandbox's network."""
    sandbox = Sandbox.create(memory="1GiB")
    if engine == "gvisor":
        sandbox.sh(IMAGE + "podman build -q -t served . && podman run --rm --network host served /bin/busybox test -e /www/index.html")
        sandbox.check_kernel()
        return
    driver = sandbox.sh("podman info --format '{{.Store.GraphDriverName}}' 2>/dev/null", user="user")
    if driver != "overlay":
        raise Failed(f"the storage driver is {driver}")
    sandbox.sh(IMAGE + "podman build -q -t served . && podman run -d --name served -p 8080:80 served", user="user")
    check_published_port(sandbox, "user")
    sandbox.sh("podman exec served /bin/busybox true && podman rm -f -t 1 served", user="user")
    sandbox.check_kernel()


def bubblewrap(engine):
    """bubblewrap creates nested sandboxes as an unprivileged user, also in forks."""
    # bubblewrap assigns addresses to devices of a new network namespace, which gVisor does not
    # support.
    network = "--share-net " if engine == "gvisor" else ""
    script = (f"bwrap --unshare-all {network}--die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp "
              "sh -c 'echo $$ $(ls /proc | grep -c ^[0-9]) $(cat /proc/sys/kernel/random/boot_id | wc -c); touch /tmp/mine; ! touch /usr/mine 2>/dev/null'")
    sandbox = Sandbox.create(memory="512MiB", cpus=1)
    child = sandbox.fork(1)[0]
    for current in (sandbox, child):
        # The first process is bubblewrap's own.
        process_id, processes, boot_id = (int(word) for word in current.sh(script, user="user").split())
        if process_id != 2 or processes > 6 or boot_id != 37:
            raise Failed(f"not isolated: process id {process_id}, {processes} processes, boot id of {boot_id} bytes")
        current.check_kernel()
    child.remove()
