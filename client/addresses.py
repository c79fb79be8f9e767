"""Where a client meets its core."""

import msgspec

ENGINE_INDEX = 0


class ClientAddresses(msgspec.Struct, kw_only=True):
    """All that a client needs to connect to a core. `output_token` is a secret between the core and its clients: hand
    it to other processes over pipes, not in arguments or the environment.
    """

    socket_dir: str
    output_token: bytes  # of TOKEN_BYTES
    client_index: int = 0
    core_pid: int = 0

    @property
    def input_address(self) -> str:
        """Where the client binds the socket for requests."""
        return f"ipc://{self.socket_dir}/input-{self.client_index}"

    @property
    def output_address(self) -> str:
        """Where the client binds the socket for outputs."""
        return f"ipc://{self.socket_dir}/output-{self.client_index}"

    def of_client(self, client_index: int) -> "ClientAddresses":
        return msgspec.structs.replace(self, client_index=client_index)
