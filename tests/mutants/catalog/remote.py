"""Mistakes in rollouts on inference servers: pushes that are not checked, answers of other weights, other defaults."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE, TRAINING = "tests/remote/test_engine.py", "tests/remote/test_training.py"
STREAM = "tests/remote/test_weight_stream.py"
FAILED_PUSH = f"{TRAINING}::test_a_server_whose_push_failed_is_left_out_paused_until_one_succeeds"
ALL_SEEM_TO_FAIL = (
    "tests/remote/test_fleet.py::test_servers_that_all_seem_to_fail_are_asked_again_where_they_have_the_weights"
)
HOSTILE = "tests/remote/test_hostile.py::test_a_hostile_server_is_left_out_and_no_prompt_is_lost"
CONTRADICTIONS = "tests/remote/test_hostile.py::test_answers_that_contradict_themselves_are_refused"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a push is not compared with the trainer's logprobs",
        "archon/remote/server.py",
        "if not (largest <= limits.largest and mean <= limits.mean):",
        "if largest > 1e9:",
        (FAILED_PUSH,),
    ),
    Mutant(
        "a push keeps the prefix cache of the old weights",
        "archon/remote/dialects/vllm.py",
        'if self._fields(http.post("/reset_prefix_cache", seconds=seconds)).at("success").value is not True:',
        "if not seconds:",
        (FAILED_PUSH,),
    ),
    Mutant(
        "answers of a server that was restarted are trained on",
        "archon/remote/server.py",
        "if name not in self.verified or version is None or int(name) < version:",
        "if version is None:",
        (f"{ENGINE}::test_a_server_that_fails_is_left_out_and_its_requests_are_asked_elsewhere",),
    ),
    Mutant(
        "the ids that end an answer are the server's",
        "archon/remote/dialects/vllm.py",
        '"ignore_eos": True,',
        '"ignore_eos": g.ignore_eos,',
        (f"{ENGINE}::test_defaults_of_the_server_decide_nothing",),
    ),
    Mutant(
        "the answers of a group go to all servers",
        "archon/remote/engine.py",
        "if group is None or server not in ready:",
        "if True:",
        (f"{ENGINE}::test_a_group_goes_to_one_server_and_groups_to_the_least_loaded",),
    ),
    Mutant(
        "logprobs of another temperature are taken for those of the sampled one",
        "archon/remote/dialects/vllm.py",
        'if scaled and (self.facts.logprobs_mode == "raw" or gconfig.greedy):',
        'if scaled and self.facts.logprobs_mode == "raw" and gconfig.greedy:',
        (f"{ENGINE}::test_values_whose_logprobs_the_server_cannot_give_are_refused",),
    ),
    Mutant(
        "an answer counts before the push that it came in is verified",
        "archon/remote/server.py",
        "while self.pushing:  # noqa",
        "while not self.url:  # noqa",
        (f"{ENGINE}::test_an_answer_of_weights_that_are_being_verified_waits_for_that",),
    ),
    Mutant(
        "an answer that a push overtook is taken for one of the weights of before",
        "archon/remote/server.py",
        'if answer.stop_reason != "abort" and self.version != version:',
        "if not self.url:",
        (f"{ENGINE}::test_an_answer_without_versions_that_a_push_overtook_is_asked_again",),
    ),
    Mutant(
        "a server outlives the trainer that started it",
        "archon/schema/keeper.py",
        "        if process is self._owner:\n            self._sweeps",
        "        if process is None:\n            self._sweeps",
        ("tests/remote/test_launch.py::test_nothing_outlives_a_trainer_that_is_killed",),
    ),
    Mutant(
        "a trainer may have weights loaded from any folder",
        "archon/serve/pushed_weights.py",
        "if resolved is None or not resolved.is_dir():",
        "resolved = (root / folder).resolve()\n        if not resolved.is_dir():",
        ("tests/remote/test_archon.py::test_what_a_push_may_not_do_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "a server that left the fleet is asked until the next push",
        "archon/remote/engine.py",
        "if server.url in self._leaving and server.failure is None:",
        "if False:",
        ("tests/remote/test_fleet.py::test_servers_join_at_a_push_and_leave_at_once",),
    ),
    Mutant(
        "a broadcast ends before its last bucket",
        "archon/remote/weight_stream.py",
        """    if held:
        yield _pack_bucket(held, size, device)
""",
        "",
        (f"{STREAM}::test_buckets_hold_every_bit_in_order_and_share_nothing",),
    ),
    Mutant(
        "the first tensor of a checkpoint is not broadcast",
        "archon/remote/engine.py",
        "for bucket in pack(tensors, stream_device(self.transport)):",
        "for bucket in pack([*tensors][1:], stream_device(self.transport)):",
        (f"{TRAINING}::test_broadcast_weights_are_those_of_a_checkpoint_and_a_server_that_fails_holds_up_no_other",),
    ),
    Mutant(
        "the folder of another run's pushes is removed while that runs",
        "archon/schema/private_directory.py",
        "fcntl.flock(self._lock, fcntl.LOCK_EX)",
        "fcntl.flock(self._lock, fcntl.LOCK_UN)",
        (
            "tests/schema/test_private_directory.py::test_a_folder_of_a_killed_process_is_removed_and_one_of_a_live_process_stays",
        ),
    ),
    Mutant(
        "a server that stays out is counted as lost at every push",
        "archon/remote/engine.py",
        "elif failures[server.url] is None:",
        "elif server.url:",
        ("tests/remote/test_fleet.py::test_losses_are_counted_once_and_by_step",),
    ),
    Mutant(
        "servers that all fail again and again are asked without end",
        "archon/remote/engine.py",
        "            self._tried_again = push.version\n",
        "",
        (ALL_SEEM_TO_FAIL,),
    ),
    Mutant(
        "servers that all seem to fail are taken back unverified",
        "archon/remote/engine.py",
        "server.verify(replace(push, limits=self._limits(server)))",
        "self._limits(server)",
        (ALL_SEEM_TO_FAIL,),
    ),
    Mutant(
        "ranks that are started again take the name of an earlier start",
        "parallel/rendezvous.py",
        "nonce = uuid.uuid4().hex",
        'nonce = "again"',
        ("tests/distributed/test_rendezvous.py::test_ranks_of_a_start_agree_on_a_name_of_their_own",),
    ),
    Mutant(
        "a server that is lost with its node is not noticed",
        "archon/remote/launchers/ray_servers.py",
        "if self._end is None or not self._ray.wait([self._end], timeout=0)[0]:",
        "if self._end is None or self.url:",
        ("tests/ray/test_servers.py::test_a_server_whose_actor_dies_has_ended_and_leaves_nothing",),
    ),
    Mutant(
        "what a server on a node of Ray has started outlives the trainer",
        "archon/schema/children.py",
        'return os.environ | {MARK: f"{mark}/{group}" if group else mark}',
        "return os.environ | {MARK: mark[:0]}",
        ("tests/ray/test_servers.py::test_nothing_outlives_a_trainer_that_is_killed",),
    ),
    Mutant(
        "Ray's handler of SIGTERM takes the place of the run's",
        "archon/remote/launchers/ray_cluster.py",
        "signal.signal(signal.SIGTERM, before)",
        "del before",
        ("tests/ray/test_servers.py::test_the_trainers_own_handler_of_sigterm_stays",),
    ),
    Mutant(
        "a run of an agent that was lost with its worker has a reward of 0",
        "rl/workflows/agent_runs.py",
        "raise AgentLost(str(error)) from None",
        "return 0.0",
        ("tests/ray/test_agents.py::test_an_agent_that_fails_costs_its_sample_and_is_counted",),
    ),
    Mutant(
        "jobs of Slurm end while the first push is made",
        "archon/remote/launchers/slurm.py",
        "while not over.wait(HEARTBEAT_INTERVAL):",
        "while not over.wait():",
        ("tests/remote/test_launch.py::test_a_job_lives_on_while_nobody_watches_it",),
    ),
    Mutant(
        "a server that is started anew elsewhere is looked for where it was",
        "archon/remote/launchers/launch.py",
        "if handle.url != old:",
        "if not old:",
        ("tests/remote/test_fleet.py::test_the_only_server_is_started_anew_elsewhere_while_answers_wait",),
    ),
    Mutant(
        "a connection is used again that the server has closed",
        "archon/remote/clients.py",
        "keepalive_timeout=REUSED_SECONDS",
        "keepalive_timeout=3600",
        (
            "tests/remote/test_http.py::test_a_connection_that_the_server_closed_while_the_loop_stood_still_is_not_used_again",
        ),
    ),
    Mutant(
        "a delta is pushed to a server of any version",
        "archon/remote/server.py",
        "patched = push.delta is not None and self.failure is None and self.version == push.since",
        "patched = push.delta is not None and self.failure is None",
        (f"{ENGINE}::test_a_delta_is_pushed_only_to_servers_at_its_base_version",),
    ),
    Mutant(
        "a delta is pushed to a server that failed",
        "archon/remote/server.py",
        "patched = push.delta is not None and self.failure is None and self.version == push.since",
        "patched = push.delta is not None and self.version == push.since",
        (f"{ENGINE}::test_a_delta_is_pushed_only_to_servers_at_its_base_version",),
    ),
    Mutant(
        "a delta names the version that it leads to as its base",
        "archon/remote/engine.py",
        "return (delta, self.version) if write_delta(old, folder, delta) else (None, None)",
        "return (delta, self.version + 1) if write_delta(old, folder, delta) else (None, None)",
        (f"{ENGINE}::test_a_delta_is_pushed_only_to_servers_at_its_base_version",),
    ),
    Mutant(
        "answers of earlier verified weights are accepted",
        "archon/remote/server.py",
        "if name not in self.verified or version is None or int(name) < version:",
        "if name not in self.verified or version is None:",
        (f"{ENGINE}::test_answers_of_weights_older_than_the_last_push_are_refused",),
    ),
    Mutant(
        "a server that scores the probe otherwise goes on serving",
        "archon/remote/server.py",
        "                self.dialect.pause(self.http, abort=True)  # no answers with wrong weights\n",
        "",
        (FAILED_PUSH,),
    ),
    Mutant(
        "a server goes on serving before its version is checked",
        "archon/remote/server.py",
        """            self._require_version(push)
            push.expected.result()  # stay paused until the scores can be compared
            if self.asleep:
                self.dialect.wake(self.http, "kv_cache", push.seconds)
            self.dialect.resume(self.http)
""",
        """            push.expected.result()
            self.dialect.resume(self.http)
            self._require_version(push)
""",
        (FAILED_PUSH,),
    ),
    Mutant(
        "a server is loaded while it serves",
        "archon/remote/server.py",
        """            self.dialect.pause(self.http, abort=True)
            if self.asleep:  # the cache stays free, because loading needs memory too
""",
        """            if self.asleep:
""",
        (f"{ENGINE}::test_a_server_that_serves_is_paused_by_a_push_that_fails",),
    ),
    Mutant(
        "logprobs above 0 are trained on",
        "archon/remote/answer_checks.py",
        "and max(numbers, default=0.0) <= LOGPROB_TOLERANCE:",
        "and max(numbers, default=0.0) <= 1:",
        (HOSTILE,),
    ),
    Mutant(
        "spans of versions may leave tokens out",
        "archon/remote/answer_checks.py",
        "if end != n and spans:",
        "if end > n and spans:",
        (HOSTILE,),
    ),
    Mutant(
        "tokens after a stop token are trained on",
        "archon/remote/answer_checks.py",
        "if first is not None and first < n - 1:",
        "if first is not None and first > n:",
        (CONTRADICTIONS,),
    ),
    Mutant(
        "an answer that stops without a stop token is trained on",
        "archon/remote/answer_checks.py",
        "not (first is not None or (tokens and expected.gconfig.stop)):",
        "not tokens:",
        (CONTRADICTIONS,),
    ),
    Mutant(
        "an answer of early length is trained on",
        "archon/remote/answer_checks.py",
        'if reason == "length" and n < expected.full:',
        'if reason == "length" and n < 1:',
        (CONTRADICTIONS,),
    ),
    Mutant(
        "experts are allocated before their size is compared",
        "archon/remote/answer_checks.py",
        "if math.prod(shape) * dtype.itemsize != len(data) - header.end():",
        "if math.prod(shape) * dtype.itemsize < len(data) - header.end():",
        ("tests/remote/test_hostile.py::test_experts_that_are_no_array_are_refused",),
    ),
    Mutant(
        "a response is read whatever its size",
        "archon/remote/http.py",
        "if len(content) > max_bytes:",
        "if len(content) > 2**26:",
        (HOSTILE,),
    ),
    Mutant(
        "a time-out holds for each read only",
        "archon/remote/http.py",
        "asyncio.timeout(seconds),",
        "asyncio.timeout(30 * seconds),",
        ("tests/remote/test_http.py::test_a_byte_now_and_then_is_late",),
    ),
    Mutant(
        "a server may abort a request forever",
        "archon/remote/engine.py",
        "aborts[server.url, self.version]) > MAX_ABORTS:",
        "aborts[server.url, self.version]) > 20 * MAX_ABORTS:",
        (HOSTILE,),
    ),
    Mutant(
        "a request that one server refuses is lost",
        "archon/remote/engine.py",
        "                refusals[server.url] = error\n",
        "                raise error\n",
        (HOSTILE,),
    ),
    Mutant(
        "a server that refuses what others answer stays in the fleet",
        "archon/remote/engine.py",
        "self._lose(other, refusals[other.url])",
        "refusals[other.url]",
        ("tests/remote/test_hostile.py::test_a_request_that_every_server_refuses_is_at_fault",),
    ),
    Mutant(
        "a response of an endpoint is read whatever its size",
        "rl/endpoint.py",
        "if len(content) > limit:",
        "if len(content) > 2**26:",
        ("tests/rl/test_endpoint.py",),
    ),
    Mutant(
        "an endpoint may be late",
        "rl/endpoint.py",
        "asyncio.timeout(self._seconds),",
        "asyncio.timeout(20 * self._seconds),",
        ("tests/rl/test_endpoint.py",),
    ),
    Mutant(
        "the key of inference servers goes to others",
        "archon/remote/http.py",
        "if sends_key and os.environ.get(KEY):",
        "if os.environ.get(KEY):",
        ("tests/remote/test_http.py::test_the_key_is_sent_to_inference_servers_only",),
    ),
    Mutant(
        "a server takes pushed weights that are not finite",
        "archon/serve/pushed_weights.py",
        "self._require_finite(path, model.state_dict())",
        "pass",
        ("tests/remote/test_archon.py::test_what_a_push_may_not_do_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "a server that ignores SIGTERM outlives its trainer",
        "archon/schema/keeper.py",
        "number = signal.SIGTERM if now - self._start < self._grace else signal.SIGKILL",
        "number = signal.SIGTERM",
        ("tests/remote/test_launch.py::test_nothing_outlives_a_trainer_that_is_killed",),
    ),
    Mutant(
        "children of a server outlive it",
        "archon/schema/children.py",
        "    kill_group_after(child.pid, group)\n",
        "",
        ("tests/remote/test_launch.py::test_children_of_a_server_that_is_killed_end_with_it",),
    ),
    Mutant(
        "forks of a command outlive it",
        "archon/schema/keeper.py",
        "forks = [] if self._owner in self._awaited else [fork.pid for fork in self._forks]",
        "forks = []",
        ("tests/cli/test_orphans.py::test_children_of_a_killed_command_end[forks]",),
    ),
    Mutant(
        "the keeper ends with the process group of its owner",
        "archon/schema/children.py",
        "start_new_session=True,  # Ctrl-C and kills of this process's group do not reach it",
        "start_new_session=False,",
        ("tests/schema/test_private_directory.py",),
    ),
    Mutant(
        "the folder of a killed command stays",
        "archon/schema/keeper.py",
        "                shutil.rmtree(folder, ignore_errors=True)",
        "                del folder",
        ("tests/schema/test_private_directory.py",),
    ),
    Mutant(
        "a rank outlives its torchrun",
        "archon/cli/app.py",
        "    end_with_launcher()\n",
        "",
        ("tests/cli/test_orphans.py::test_children_of_a_killed_command_end[rank]",),
    ),
    Mutant(
        "any number of ranks is started on one machine",
        "archon/tools/bench/config.py",
        "if reason := rank_limit_error(ranks):",
        "if (reason := rank_limit_error(ranks)) and ranks < 0:",
        ("tests/cli/test_orphans.py::test_bench_refuses_a_layout_of_more_ranks",),
    ),
    Mutant(
        "torchrun's ranks load PyTorch on a machine that cannot run them",
        "archon/cli/app.py",
        "        _require_capacity()\n",
        "",
        ("tests/schema/test_capacity.py",),
    ),
    Mutant(
        "the memory limit of a container does not count",
        "archon/schema/capacity.py",
        'for name in ("memory.max", "memory.limit_in_bytes"):',
        'for name in ("memory.high",):',
        ("tests/schema/test_capacity.py",),
    ),
    Mutant(
        "the limit of a parent control group does not count",
        "archon/schema/capacity.py",
        "yield from [group, *(parent for parent in group.parents if parent.is_relative_to(folder))]",
        "yield group",
        ("tests/schema/test_capacity.py",),
    ),
    Mutant(
        "a restarted server keeps a port that another process listens at",
        "archon/remote/launchers/base.py",
        "return _free_port(host)\n",
        "return preferred\n",
        ("tests/serve/test_listening.py::test_a_restarted_server_leaves_a_port_that_another_process_has_taken",),
    ),
    Mutant(
        "the address of a server is only checked after its model was read",
        "archon/cli/serve.py",
        "    check_address(host, port, token)  # before a model is loaded\n",
        "",
        ("tests/serve/test_listening.py::test_the_address_is_checked_before_the_model_is_read",),
    ),
    Mutant(
        "a host without an address is a traceback",
        "archon/schema/listening.py",
        "except (socket.gaierror, UnicodeError, ValueError) as error:",
        "except UnicodeDecodeError as error:",
        ("tests/serve/test_listening.py::test_a_host_that_cannot_be_used_is_one_line",),
    ),
    Mutant(
        "pushed weights of another model replace the served ones",
        "archon/cli/serve.py",
        "        require_same_model(folder, engine.model.args)  # before memory is allocated\n",
        "",
        ("tests/remote/test_hostile_pushes.py::test_a_hostile_push_changes_nothing",),
    ),
    Mutant(
        "a worker allocates whatever a weight stream announces",
        "archon/remote/weight_stream.py",
        "or not 0 <= sizes[1] <= most:",
        "or sizes[1] == most:",
        ("tests/remote/test_weight_stream.py::test_a_worker_leaves_a_malformed_stream_at_once",),
    ),
    Mutant(
        "a tensor may end beyond its bucket",
        "archon/remote/weight_stream.py",
        "if end > bucket.data.numel():",
        "if end < 0:",
        ("tests/remote/test_weight_stream.py::test_a_malformed_bucket_is_refused",),
    ),
)
