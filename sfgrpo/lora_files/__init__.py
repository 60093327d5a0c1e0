"""LoRA files of any trainer: what they are, what loaders make of them, and the one form that loads everywhere.

The trainers of this project need only `file.read_lora` and `convert.factors_named`, to go on from a file. In the order
of reading: `header` and `file` (checked before they are used), `keys` (the dialects of trainers), `scale` (alpha),
`names` and `families` (the layers of each model), `metadata` and `recognise` (whose layers they are), `understand` (a
file in terms of its model), `convert`, `merge`, `loaders` and `diffusers_loader` (what ComfyUI and diffusers load) and
`doctor` (all of it in words).
"""
