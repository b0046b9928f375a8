"""An Ethernet switch that loses frames, for kernels without netem. Run it in the hub's namespace.

    python lossy_switch.py INTERFACE...

It forwards a frame for MAC 02:00:00:00:07:<j> to the j-th interface, and prints "ready" once it
does. Lines that it reads: "loss SHARE" loses this share of all frames, "cut J" all frames from and
to the j-th interface, silently.
"""

import random
import selectors
import socket
import sys
from contextlib import suppress

ANY_PROTOCOL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
HEADER = 10  # of struct virtio_net_hdr, which keeps large segments whole


def main(interfaces: list[str]) -> None:
    ports = []
    for name in interfaces:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        port.bind((name, ANY_PROTOCOL))
        ports.append(port)
    watch = selectors.DefaultSelector()
    for number, port in enumerate(ports):
        watch.register(port, selectors.EVENT_READ, number)
    watch.register(sys.stdin, selectors.EVENT_READ, None)
    chance, share, lost = random.Random(0), 0.0, set()
    print("ready", flush=True)
    while True:
        for key, _ in watch.select():
            if key.data is None:
                words = sys.stdin.readline().split()
                if not words:
                    return
                if words[0] == "loss":
                    share = float(words[1])
                else:
                    lost.add(int(words[1]))
                print("done", flush=True)
                continue
            with suppress(OSError):  # of an interface that is down
                frame = ports[key.data].recv(1 << 17)
                to = frame[HEADER + 5] if len(frame) > HEADER + 5 else len(ports)
                if to < len(ports) and not lost & {key.data, to} and chance.random() >= share:
                    ports[to].send(frame)


if __name__ == "__main__":
    main(sys.argv[1:])
