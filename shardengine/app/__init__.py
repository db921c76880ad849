"""The commands. The training loop uses only the library's public names; other files may use internal ones.

cli          the command line's arguments, and the call of each command
command      train, the parent: checks everything, builds the default model, starts the ranks with torchrun
init         init: writes a config that fits, with the commands to run it
planning     plan: a run's needs, printed and drawn; the plan that train makes of its own run
what_fits    the smallest change that makes a plan fit
dry_run      train --dry-run
loop         one rank: the training loop, to be read as an example of the library
corpus       the built-in text and the small model that is made for it
jsonl        files of JSON lines, with errors that name the line
hub_data     datasets of the Hub, as rows of such files
chat         conversations to tokens; the assistant's turns are learnt
packing      several separate documents in one row; whether a model supports it
reading      files to rows of tokens
data         rows of tokens, and which rank reads which row when
adapters     LoRA adapters of peft
four_bits    a frozen base of 4 bits, and one without values for plans
evaluation   the validation loss
global_mean  the weight of each micro-batch's loss, so that every valid token counts the same
flops        FLOPs of a model's training, for MFU
report       rank 0's output on stdout and in files
resume       checkpoints: when one is saved, and the settings that --resume takes from an earlier run
job          ranks that a launcher restarted find their run
restarts     the parent restarts ranks that died: how often, and the line to print
stopping     Ctrl-C, SIGTERM and failures: between the parent and its ranks
environment  env: the facts for a bug report
script       run: a script that was written for DeepSpeed
settings     the options of train              rank_sums  sums of a few numbers over ranks
sources      the config's source: a file or a recipe by name, and --set and --lr
export, convert, inspect_checkpoint            the commands of these names (convert: import)
merging      adapters of a checkpoint merged into their base model
"""
