"""Commands whose options may also come from a YAML file: `--config FILE`, where a command has that option."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """The file is read as options in front of the command line's, which therefore win and are checked alike."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        path = self._config_path(args or ())
        if path is None:
            return super().parse_known_args(args, namespace)
        options, positionals = self._read_config(path)
        namespace, _ = super().parse_known_args(options, namespace)
        result, unknown = super().parse_known_args(args, namespace)
        for name, values in positionals.items():
            if not getattr(result, name):
                setattr(result, name, values)
        return result, unknown

    def _config_path(self, args: Sequence[str]) -> str | None:
        if "--config" not in self._option_string_actions:
            return None
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, _ = finder.parse_known_args([*args])
        return found.config if isinstance(found.config, str) else None

    def _read_config(self, path: str) -> tuple[list[str], dict[str, list[str]]]:
        """The file as a command line, and its positional arguments. Ends the program where it is none."""
        import yaml

        try:
            with open(path, encoding="utf-8") as file:
                content = yaml.safe_load(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.error(f"--config {path}: {' '.join(str(error).split())}")
        if content is None:
            return [], {}
        if not isinstance(content, dict):
            self.error(f"--config {path}: it must hold names and values, not a {type(content).__name__}")
        several = {action.dest for action in self._actions if not action.option_strings}
        options: list[str] = []
        positionals: dict[str, list[str]] = {}
        unknown: list[str] = []
        for name, value in self._flat(content):
            action = self._option_string_actions.get("--" + name)
            if name in several:
                positionals[name] = [str(item) for item in (value if isinstance(value, list) else [value])]
            elif action is None or name in ("config", "help"):
                unknown.append(name)
            else:
                options += _spelled(action, name, value)
        if unknown:
            self.error(f"--config {path}: no such option: {', '.join(unknown)}")
        return options, positionals

    def _flat(self, content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
        """`ssl: {keyfile: k}` is ssl-keyfile; a mapping for an option that takes JSON stays whole."""
        for key, value in content.items():
            name = prefix + str(key).replace("_", "-")
            if isinstance(value, dict) and "--" + name not in self._option_string_actions:
                yield from self._flat(value, name + "-")
            else:
                yield name, value


def _spelled(action: argparse.Action, name: str, value: object) -> list[str]:
    """The option as it would be typed; nothing where the value is what its absence means."""
    flag = "--" + name
    if value is None:
        return []
    if action.nargs == 0:  # a switch
        if isinstance(value, bool):
            negated = isinstance(action, argparse.BooleanOptionalAction) and not value
            return [flag.replace("--", "--no-", 1)] if negated else [flag] * value
        return [f"{flag}={value}"]  # argparse says that it takes no value
    if isinstance(value, list) and action.nargs == "+":
        return [flag, *map(str, value)]
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return [f"{flag}={value if is_plain else json.dumps(value)}"]
