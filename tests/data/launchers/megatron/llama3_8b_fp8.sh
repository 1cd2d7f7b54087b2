#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=1
TP_SIZE=1
MICRO_BATCH_SIZE=1
SEQ_LENGTH=8192

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --micro-batch-size ${MICRO_BATCH_SIZE}
    --global-batch-size ${GLOBAL_BATCH_SIZE:-128}
    --bf16
    "--fp8-format hybrid"
    "--fp8-param-gather"
    --grad-reduce-in-bf16
    --tensor-model-parallel-size $TP_SIZE
    # --pipeline-model-parallel-size $PP_SIZE
    --sequence-parallel  # switched off with one tensor parallel rank
    --use-distributed-optimizer
    "--vocab-size 128256"
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${ARGS[@]}
