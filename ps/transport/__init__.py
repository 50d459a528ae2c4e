"""Bytes on their way: sockets, connections, links that are striped, slow, cut or modelled."""
