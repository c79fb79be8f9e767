"""Shell completion: `corespan --completion bash|zsh|fish` prints a script made from the parser itself."""

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """To be sourced: `source <(corespan --completion bash)`, or `corespan --completion fish | source`."""
    commands = list(_commands(parser, ()))
    return _fish(commands) if shell == "fish" else _bash(commands, with_compinit=shell == "zsh")


Command = tuple[tuple[str, ...], argparse.ArgumentParser]


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Command]:
    """Every parser with the words that lead to it."""
    yield path, parser
    for name, sub in _subcommands(parser).items():
        yield from _commands(sub, (*path, name))


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _choices(action: argparse.Action) -> list[str]:
    return [str(choice) for choice in action.choices or ()]


def _bash(commands: list[Command], with_compinit: bool) -> str:
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if with_compinit else []
    lines += [
        "_corespan() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" command="" word words=""',
        '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        case "$command $word" in',
        *(
            f'            "{" ".join(["", *path[:-1]])} {path[-1]}") command="$command $word" ;;'
            for path, _ in commands[1:]
        ),
        "        esac",
        "    done",
        '    case "$command $previous" in',
    ]
    for path, parser in commands:
        for action in _options(parser):
            if choices := _choices(action):
                patterns = "|".join(f'"{_joined(path)} {flag}"' for flag in action.option_strings)
                lines.append(f'        {patterns}) words="{" ".join(choices)}" ;;')
    lines += ["    esac", '    [ -n "$words" ] || case "$command" in']
    for path, parser in commands:
        flags = [flag for action in _options(parser) for flag in action.option_strings if flag.startswith("--")]
        lines.append(f'        "{_joined(path)}") words="{" ".join([*_subcommands(parser), *flags])}" ;;')
    return "\n".join(
        [
            *lines,
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _corespan corespan",
            "",
        ]
    )


def _joined(path: tuple[str, ...]) -> str:
    return "".join(f" {name}" for name in path)


def _fish(commands: list[Command]) -> str:
    lines = ["complete -c corespan -e"]
    for path, parser in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        subcommands = _subcommands(parser)
        if subcommands:
            seen_none = f"not __fish_seen_subcommand_from {' '.join(subcommands)}"
            condition = "; and ".join([*seen, seen_none])
            lines += [f"complete -c corespan -f -n '{condition}' -a '{name}'" for name in subcommands]
        condition = "; and ".join(seen) or "__fish_use_subcommand"
        for action in _options(parser):
            long, choices = [flag[2:] for flag in action.option_strings if flag.startswith("--")], _choices(action)
            if long:
                takes = " -r" if action.nargs != 0 else ""
                values = f" -x -a '{' '.join(choices)}'" if choices else takes
                names = "".join(f" -l {name}" for name in long)
                lines.append(f"complete -c corespan -n '{condition}'{names}{values}")
    return "\n".join([*lines, ""])
