"""Random programs of torch.distributed calls, run on real ranks and compared with a model: docs/design/random-programs.md.

`generate` makes a program from a seed, `model` says what it must give, `run` runs it on a rank, `pool` keeps ranks to run on,
`judge` compares, `shrink` makes a failing program small, `render` writes it as a script of plain torch calls, `mutants` plants
faults that must be found; `engine_faults` lists those of the crates, which `plant` looks for with programs under virtual time.
"""
