"""`bos_token`, `eos_token_id` and their like, as attributes of a tokenizer that keeps its special tokens by name."""

from typing import Any, Protocol

from ...shared.tokenizer_files import Token


class HasSpecialTokens(Protocol):
    @property
    def special_tokens_map(self) -> dict[str, str]: ...

    def set_special_token(self, name: str, token: Token | None) -> None: ...

    def convert_tokens_to_ids(self, tokens: str) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


class SpecialToken:
    """`bos_token` and its like: the token's text, None where there is none. May be set to another token."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: HasSpecialTokens, owner: type | None = None) -> str | None:
        return tokenizer.special_tokens_map.get(self.name)

    def __set__(self, tokenizer: HasSpecialTokens, token: Token | None) -> None:
        tokenizer.set_special_token(self.name, token)


class SpecialTokenId:
    """`bos_token_id` and its like."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.token_name = name.removesuffix("_id")

    def __get__(self, tokenizer: HasSpecialTokens, owner: type | None = None) -> int | None:
        token = tokenizer.special_tokens_map.get(self.token_name)
        return None if token is None else tokenizer.convert_tokens_to_ids(token)

    def __set__(self, tokenizer: HasSpecialTokens, token_id: int | None) -> None:
        token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
        tokenizer.set_special_token(self.token_name, token)
