"""Callbacks for the loops of other libraries. Each module needs its library; `import gossamer` imports none of them.

`gossamer.integrations.lightning` and `gossamer.integrations.transformers` have a `SparsifierCallback`,
`gossamer.integrations.peft` merges adapters under the masks. accelerate needs nothing:
docs/integration.md shows its loop.
"""
