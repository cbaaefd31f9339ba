"""Announce that an address is at this interface: `gratuitous_arp.py INTERFACE ADDRESS`."""

import socket
import struct
import sys

ETH_P_ARP, REQUEST, REPLY = 0x0806, 1, 2


def main(interface: str, address: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind((interface, ETH_P_ARP))
        mac = sender.getsockname()[4]
        packed = socket.inet_aton(address)
        for operation in (REQUEST, REPLY):
            head = b"\xff" * 6 + mac + struct.pack("!HHHBBH", ETH_P_ARP, 1, 0x0800, 6, 4, operation)
            sender.send(head + mac + packed + b"\xff" * 6 + packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
