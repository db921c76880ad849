"""Integrations with training frameworks, through the frameworks' own extension points; one module per framework.

Only users import these modules, by name, because each needs its framework. Must not know: engine internals.
"""
