"""A real S3 server on this machine, and one that answers late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def s3_server(bucket: str = "lake", latency_s: float = 0.0) -> Iterator[str]:
    """moto's S3 on a free port, with an empty bucket, as the environment's endpoint; yields ``s3://bucket``.

    ``latency_s`` is added to each request, by a proxy between client and server.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        if latency_s:
            host, port = stack.enter_context(_late(host, port, latency_s))
        settings = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        stack.enter_context(mock.patch.dict(os.environ, settings))
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}"


@contextlib.contextmanager
def _late(host: str, port: int, latency_s: float) -> Iterator[tuple[str, int]]:
    """A proxy that holds back what a client sends for `latency_s`: a request's answer comes so much later."""
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                if delay:
                    await asyncio.sleep(delay)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, far_writer, latency_s), pump(far_reader, writer, 0.0))

    server = loop.run_until_complete(asyncio.start_server(connected, sock=listener))
    thread = threading.Thread(target=loop.run_forever, name="late-proxy", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        server.close()
