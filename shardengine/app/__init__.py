"""The commands. The training loop is an ordinary user of the library's public names; the rest may look further.

cli          arguments of the command line, and what is called
command      train, the parent: checks everything, builds the default model, starts the ranks with torchrun
init         init: writes a config that fits, with the commands to run it
planning     plan: what a run needs, printed and drawn; the plan that train makes of itself
what_fits    of a plan that does not fit, the smallest change with which it does
dry_run      train --dry-run
loop         one rank: the training loop, to be read as an example of the library
corpus       the built-in text and the small model that is made for it
jsonl        files of JSON lines, with errors that name the line
hub_data     datasets of the Hub, as rows of such files
chat         conversations to tokens, of which the assistant's turns are learnt
packing      several documents in one row, apart from each other; whether a model can do it
reading      files to rows of tokens
data         what a row of tokens is, and which rank reads which row when
adapters     LoRA adapters of peft
four_bits    a frozen base of 4 bits, and one without values for plans
evaluation   the validation loss
global_mean  what each micro-batch's loss weighs, so that every valid token counts the same
flops        FLOPs of a model's training, for MFU
report       what rank 0 prints and writes
resume       checkpoints: what --resume takes from an earlier run, when one is saved
job          ranks that a launcher has started again find the run that they were making
restarts     ranks that died are started again by the parent: how often, and what is said
stopping     Ctrl-C, SIGTERM and failures: between the parent and its ranks
environment  env: what a bug report needs
script       run: a script that was written for DeepSpeed
settings     what train was asked for             rank_sums  sums of a few numbers over ranks
sources      where a config is from: a file or a recipe by name, and --set and --lr
export, convert, inspect_checkpoint               the commands of these names (convert: import)
merging      adapters of a checkpoint merged into their base model
"""
