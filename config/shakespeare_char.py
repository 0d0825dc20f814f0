# nanoGPT's baby GPT on Tiny Shakespeare by character: 6 layers, 384 wide, with our recipe (Muon, wsd, RoPE, QK-norm).
#   python train.py config/shakespeare_char.py                      # one GPU
# On a CPU, at the size of nanoGPT's README:
#   python train.py config/shakespeare_char.py --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 \
#       --dropout=0 --learning_rate=8e-3 --max_iters=300      # 1 minute; validation loss 1.836 (one run)
dataset = 'shakespeare_char'
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

batch_size = 64
max_iters = 1000
learning_rate = 4e-3
warmup_iters = 50
eval_interval = 100
eval_tokens = 0  # the whole split
