# figure 13 with PP=2, TP=64/PP, NLS=32, HS=20480, NAH=128
--tensor-model-parallel-size 32 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 32 \
--num-layers 32 --hidden-size 20480 --num-attention-heads 128 --seq-length 2048 --max-position-embeddings 2048 --fp16 \
--activations-checkpoint-method uniform
