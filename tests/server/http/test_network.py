"""How the server is reached: under a proxy's path, over TLS."""

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from http_server import ServerThread

from corespan.server.serve_options import ServeOptions


def test_paths_of_a_proxy_that_keeps_its_prefix_and_of_one_that_strips_it() -> None:
    thread = ServerThread(ServeOptions(root_path="/llm", api_key=["secret"], disable_uvicorn_access_log=True))
    try:
        with httpx.Client(base_url=thread.url) as client:
            for prefix in ("", "/llm"):
                assert client.get(f"{prefix}/version").status_code == 200
                assert client.get(f"{prefix}/health").status_code == 503  # nothing is loaded
                assert client.get(f"{prefix}/v1/models").status_code == 401
                headers = {"Authorization": "Bearer secret"}
                assert client.get(f"{prefix}/v1/models", headers=headers).status_code == 503
    finally:
        thread.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Key and certificate of 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=test"]
        + ["-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    return key, cert


def test_tls_and_certificates_of_clients(certificate: tuple[Path, Path]) -> None:
    key, cert = map(str, certificate)
    options = ServeOptions(
        ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2, disable_uvicorn_access_log=True
    )
    thread = ServerThread(options)
    try:
        known = ssl.create_default_context(cafile=cert)
        known.load_cert_chain(cert, key)
        assert httpx.get(f"{thread.url}/version", verify=known).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{thread.url}/version", verify=ssl.create_default_context(cafile=cert))
    finally:
        thread.close()
