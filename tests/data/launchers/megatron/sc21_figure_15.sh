# figure 15 with TP=2, DP=64/TP, NLS=32, HS=3840, NAH=32
TP=2
PP=1
--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} --micro-batch-size 1 --global-batch-size 32 \
--num-layers 32 --hidden-size 3840 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --fp16 \
--activations-checkpoint-method uniform
