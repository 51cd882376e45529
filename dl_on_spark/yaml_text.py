"""YAML as people mean it: a mapping that names an entry twice is wrong, not the last one's."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which alone would keep the last of two equal keys in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem=f"the entry {key!r} is there twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


def load_yaml(text: str) -> Any:
    """The value of YAML `text`. Raises `yaml.YAMLError`, also for an entry that is there twice."""
    return yaml.load(text, Loader=_Loader)
