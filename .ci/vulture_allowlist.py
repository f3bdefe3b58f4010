"""Names that nothing in the product reads, and why each is no dead code. `vulture` takes a name here as a use of it."""
# ruff: noqa: B018, F821

# Python calls or reads them: an isinstance test, a class set on an instance.
_.__instancecheck__
_.__class__

# torch reads them: the backward of a custom operator, a module's repr, the pipeline stage, one worker thread of gloo.
_._packed_backward
_.extra_repr
_.forward_maybe_with_nosync
_.has_backward
_._threads

# Other libraries read them: http.server, uvicorn, Starlette, tokenizers, math-verify.
_.daemon_threads
_.allow_reuse_address
_.do_GET
_.do_POST
_.do_DELETE
_.log_message
_.default_headers
_.media_type
_.pre_tokenizer
_.TIMEOUT_WARNING_SHOWN

# torch.distributed.checkpoint calls them, and zipfile those of a file.
_.lookup_object
_.storage_meta
_.seekable
_.tell
_.readinto

# transformers and torchtitan read them, in the benchmarks' peers.
_._validate_hf_rope_config
_.inner_attention
_.on_train_begin
_.on_step_end
_.should_training_stop

# Found by name: command line, registries, dotted paths, `archon.rl`'s lazy exports.
_.digits
_.vowels
_.OnlineWorkflow
_.EnvironmentWorkflow
_.make_environment
_.StepByStep
_.check_preference
_.check_rl
_.adapt_workflow
_.make_trainer
_.Calculator
_.GroupedWorkflow
_.MultiTurnWorkflow
_.PreferenceTrainer
_.ProcessAgent
_.clevr_count_70k_reward
_.exact_match_reward
_.geometry3k_reward
_.gsm8k_reward
_.math_verify_reward

# Public interface that users call; the contracts of AReaL and Trinity-RFT name most of it.
_.AsyncRewardPropagationWorkflow
_.AsyncStepWiseRewardWorkflow
_.TextEnv
_.VALID_DATASETS
_.auxiliary_model_wrappers
_.can_reset
_.convert_messages_to_experience_async
_.process_messages_to_experience_async
_.trust_remote_code
_.eid
_.forward_with_entropy
_.fsdp_enabled
_.fsdp_gradient_divide_factor
_.context_and_model_parallel_size
_.get_aiohttp_session
_.get_httpx_client
_.get_openai_async_client
_.get_version
_.is_supported_model
_.load_latest
_.offload
_.onload
_.pause
_.register_model_spec
_.sample_index
_.save_model
_.seq_len_divisor
_.stat_scope
_.to_hf
_.ttft
_.verify_gold
_.decode_tokens
_.duplicate_tokens
_.shared_prompts
_.session_rows

# A model that sees, before processing and layouts use it: models/README.md, "Vision-language models".
_.Qwen35StateDictAdapter
_.multimodal_positions

# Arguments of a documented signature that an implementation need not read.
completion_ids
exps
extra_kwargs

# A field that attention backends look up by name in the list of what they support.
_.soft_cap

# Fields that are written to a record, or summed over all fields.
_.calibrates
_.expert_parallel
_.fsdp
_.grad_norm
_.tensor_parallel
_.told
_.unpredicted

# Fields of the wire formats of OpenAI and Anthropic: accepted, refused or answered, by pydantic.
_.annotations
_.audio
_.cache_control
_.citations
_.completion_tokens
_.created
_.created_at
_.disable_parallel_tool_use
_.echo
_.frequency_penalty
_.function_call
_.incomplete_details
_.input_tokens_details
_.is_error
_.logit_bias
_.max_completion_tokens
_.output_tokens_details
_.owned_by
_.parallel_tool_calls
_.param
_.presence_penalty
_.previous_response_id
_.prompt_token_ids
_.prompt_tokens
_.response_format
_.service_tier
_.stop_sequences
_.strict
_.text_offset
_.thinking
_.token_ids
_.token_logprobs
_.tool_call_id
_.top_logprobs
_.total_tokens
_.truncation
_.user
_.budget_tokens
_.display
_.inference_geo
_.include_obfuscation
_.reasoning_content
_.modalities
_.prediction
_.verbosity
_.safety_identifier
_.prompt_cache_key
_.prompt_cache_options
_.prompt_cache_retention
_.encrypted_content
_.generate_summary
_.include
_.background
_.max_tool_calls

# Families of other packages use them: a contract of the adapters, and the names of stacked experts.
_.convert_single_to_hf
STACKED_EXPERTS_HF_MAP

# AReaL's and Hugging Face's interfaces, which users call: `archon.rl.compat.areal`, `RowDataset`, registration by name.
_.PPOTrainer
_.__getattr__
_.check_tensor_consistency
_.clevr_count_70k_reward_fn
_.geometry3k_reward_fn
_.get_custom_reward_fn
_.get_hhrlhf_dpo_dataset
_.get_hhrlhf_rw_dataset
_.get_math_verify_worker
_.gsm8k_reward_fn
_.output_message_list
_.patch_dist_group_timeout
_.pipeline_llm
_.precompute_rope_cache
_.record_timing
_.register_dataset
_.register_reward
_.register_workflow
_.rename_column
_.stats_tracker
_.to_tensor_dict
_.world_mesh

# vLLM calls or reads them, in `archon.serve.vllm_extension`.
_.init_info_cls
_.update_info_cls
_.init_transfer_engine
_.start_weight_update
_.receive_weights
_.parse_update_info
_.finish_weight_update
_.shutdown
_.Extension

# `GET /v1/adapters` and the answer of an unloading send them; vLLM's field must be empty.
_.answer_tokens
_.deleted
_.lora_int_id
