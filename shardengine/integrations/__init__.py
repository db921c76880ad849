"""shardengine inside of frameworks, by the frameworks' own means of extension; one file each, imported by its name.

Nothing imports these files but users: each needs its framework. Must not know: the engine behind its public surface.
"""
