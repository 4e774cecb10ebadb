"""Guard of the vocabulary (docs/glossary.md): none of the words that it replaced comes back, as an identifier or in a
comment.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "flash_attn", "flash_attn_3", "tests", "benchmarks", "tools", "examples", "docs")
SUFFIXES = (".h", ".cu", ".cpp", ".py", ".pyi", ".md", ".sh", ".json", ".toml")
CLOSED = ("docs/tuning/log/", "benchmarks/results/", "tests/build/test_words.py")  # history, and the list itself
# Old identifier, the field's; file names count as identifiers.
IDENTIFIERS = dict(
    pair.split()
    for pair in """
align_interior align_unmasked; best_key_shares best_num_splits; block_interior_first block_unmasked_first;
block_pair cluster_pair; BlockPair ClusterPair; brings_query loads_query; bwd_dq_adder bwd_dq_reduce_warp;
bwd_dq_group bwd_dq_warpgroup; BwdDqAdder DqReduceWarp; BwdDqGroup DqWarpgroup; carried_stats accumulated_stats;
carries_in accumulates; chunk_cols atom_cols; clear_keyless_rows fully_masked_lse;
clear_unseen_values clear_masked_values; col_words col_bits; column_share column_half; copy_piece copy_vector;
cut_tile split_tile; CutRule SplitRule; CutTile SplitTile; dense_row_block dense_work_tile;
dq_column_share dq_column_slice; dq_group dq_warpgroup; dq_place dq_state; dq_turn dq_semaphore_value;
dq_turns dq_semaphore; dq_turns_ptr dq_semaphore_ptr; DqPlace DqLocation; draw_all make_all_keep_masks;
draw_here make_keep_mask_here; draws_kept rare_is_kept; draws_late fetches_late; draws_tiles dynamic_scheduler;
dropout_draws_kept dropout_rare_is_kept; dropout_pairs dropout_col_bits; dropout_rows dropout_row_bits;
DropoutWords RandomBits; edge_count masked_count; edges_begin masked_begin; exponentiate_ahead exp2_speculative;
exponentiate_apart exp2_with_sums; exponentiate_around_pv exp2_with_sums;
exponentiate_biased_ahead exp2_speculative_alibi; exponentiate_capped exp2_softcap_poly;
find_kv_start find_cta_work; find_kv_start_of_few find_cta_work; finish_exponentials finish_exp_before_pv_wait;
finish_rows finalize_rows; first_edge first_masked_block; first_needed_key first_required_key;
first_section first_band; first_seeing_row first_unmasked_row; first_seen_key first_unmasked_key;
Flash_fwd_shares_params Flash_fwd_split_params; fold_runs combine_ordered; for_each_draw for_each_random_bits;
for_each_drawn_block for_each_work_tile; forced_key_shares forced_num_splits; fwd_merge run_combine;
fwd_merge_kernel combine_kernel; has_dq_group has_dq_warpgroup; hidden_full trip_count_full;
hidden_steps skipped_blocks; HiddenSteps SkippedBlocks; hides_left masks_left; hides_right masks_right;
hold_loads wait; in_sections in_bands; interior_begin unmasked_begin; interior_blocks unmasked_blocks;
interior_end unmasked_end; interior_rows unmasked_rows; interior_steps_end unmasked_steps_end;
is_interior is_unmasked; is_moderate speculation_holds; is_share is_split; k_place k_state;
kAlignsInterior kAlignUnmasked; kAlternatesDq kAlternateDq; kBoundsBySquares kCheckBoundByNorm;
kCappedSlackLog2 kSoftcapThresholdLog2; kCarry kAccumulate; kChecksBehindPv kExpAfterPvWait;
kChunkBytes kAtomBytes; kChunkCols kAtomCols; kChunks kFixedSplits; kChunksV kAtomsV; kColVectors kColBitVectors;
kColWordsWarp kColBitsWarp; kDqGroup kDqWarpgroup; kDqGroupRegisters kDqWarpgroupRegisters; kDqPlace kDqLocation;
kDraws kMakesKeepMasks; kDrawsInPv kRandomBitsInPv; kDrawsLate kFetchNextTileLate; kDropsPacked kPackedDropout;
kEdge kMasked; kEdgesGoAhead kSpeculativeOnMasked; keep_short_series load_short_series;
key_block_at bwd_work_tile_at; key_share key_half; key_shares num_splits; key_walk kv_block_order;
KeyBlock BwdWorkTile; keyed_lse lse_or_inf; keyless_lse fully_masked_lse; KeyShares KvSplits;
KeySharesCost SplitsCost; KeyWalk KvBlockOrder; kFewRowBlocks kFewTiles; kFineWords kFineBits;
kFinishesExponentials kExpBeforePvWait; kFirstAddingWarp kFirstDqReduceWarp; kGoesAhead kSpeculativeExp;
kHasDqAdders kHasDqReduceWarps; kHasDqGroup kHasDqWarpgroup; kKeepsDq kDqInSmem; kKeepsLimits kMaskBoundsInRegs;
kLeastShareBytes kMinCtaBytes; kMaxKeyShares kMaxSplits; kMayPair kMayCluster; kMergedParts combine_partials;
kMostAhead kMaxSpeculativeSum; kOwnChunks kOwnAtoms; kPieceCols kVectorCols; kPieces kVectors;
kPlansFirst kMaskFirstOnDemand; kRefused kRejected; kSectionBytes kBandBytes; kSeesAll kNoMask;
kSharesKeys kSplitKv; kSlackLog2 kThresholdLog2; kSoftmaxSlackLog2 kRescaleThresholdLog2;
kStagesApart kSeparateOSmem; kStartsEarly kIssueNextQkEarly; kStepsLeft kStepsBeforeRelease;
kStoredChunks kStoredAtoms; kTakesTurns kPingPong; kTeams kConsumerGroups; kTilesPerTeam kTilesPerConsumerGroup;
kTokenBarrier wait_for_order_barrier; kTurnBarrier kPingPongBarrier; kTurnWarp kDqSemaphoreWarp;
kv_free_segment block_span; kv_in_pairs kv_in_clusters; kv_is_half kv_is_cluster_half; kv_may_cut kv_may_split;
kv_needed_rows kv_required_rows; kv_place kv_state; kv_place_ kv_state_; kv_segment block_span;
kv_share blocks_per_cta; kv_sharing_blocks splitting_ctas; kv_start_of_one CtaWork;
kvcache_fold_kernel decode_combine_ordered_kernel; kvcache_merge decode_combine;
kvcache_merge_kernel decode_combine_kernel; KvCuts SplitPoints; KvHeader SchedHeader; KvPart WorkPart;
KvRecord SchedEntry; KvSegment BlockSpan; KvStart CtaWork; KvWalk WorkIterator; LaneRows RowBits;
late_row_blocks num_tail_tiles; least_share min_blocks_per_cta; leave_dq stage_dq_tile; leave_ds store_ds;
leave_zeros store_zero_ds; left_edges masked_left_count; left_place ds_state; left_place_ ds_state_; let_go release;
let_go_before release_early; loaded_block block_to_load; mask_and_go_ahead mask_and_speculate;
masked_first first_to_mask; may_exceed_slack may_exceed_threshold; may_go_ahead may_speculate;
may_share is_split_kv; may_share_keys may_split_kv; may_split_keys may_use_decode_kernels;
merge_halves combine_halves; merge_partials combine_partials; merged_groups combined_groups;
merges_by_tile combines_by_tile; merges_one_row combines_one_row; misses_pages has_invalid_page;
misses_pages_beside has_invalid_page_beside; most_interior_blocks max_unmasked_blocks; neighbor like;
next_edge next_masked; packs_keys keys_packed; part_steps warpgroup_trip_count; PartSteps WarpgroupTripCount;
pass_keys skip_k; pass_token arrive_at_order_barrier; pass_turn dq_semaphore_release;
pass_turn_of release_dq_semaphore; pass_turns release_dq_semaphores; pass_values skip_v;
peek_turn dq_semaphore_peek; piece_place swizzle_offset; prefers_shared_dq prefers_dq_in_smem; q_place q_state;
raise_reference update_row_max; raise_references update_row_maxima; read_col_words read_col_bits;
right_edges masked_right_count; RingIndex PipelineState; row_block_at work_tile_at; row_blocks m_blocks;
row_limits bounds; row_order work_tile_order; row_walk q_block_order; row_words row_bits; RowBlock WorkTile;
RowLimits ColBounds; RowOrder WorkTileOrder; RowStep QStep; RowWalk QBlockOrder; run_beside_dq_group dq_warpgroup;
run_blocks kFixedSplits; run_col_words run_col_bits; run_edges run_masked; run_fwd_merge_ run_combine;
run_interior run_unmasked; run_kvcache_merge_ run_decode_combine_; run_place partial_location;
run_split_forward run_decode_forward; RunEnd PartialKind; RunPlace PartialLocation; score_place tile_coords;
ScorePlace TileCoords; section_blocks band_tiles; section_heads band_heads; section_of band_of;
seen_begin unmasked_begin_key; set_reference set_row_max; share_keys KvSplits; share_of split_range;
share_rows split_kv_rows; share_tiles split_kv_tiles; shares_cost splits_cost; shares_keys is_split_kv;
shares_row splits_row; short_ones short_tiles; short_row_blocks num_short_tiles; slack_log2 threshold_log2;
sm90_draws_equal_tiles sm90_dynamic_scheduler_for_equal_tiles; sm90_draws_tiles dynamic_scheduler;
softmax_slack_log2 rescale_threshold_log2; split_cost decode_cost; split_rows decode_rows; split_tiles decode_tiles;
step_misses_pages step_has_invalid_page; store_dropout_words store_dropout_bits;
store_nothing_seen store_fully_masked; store_share store_partial; StoredWords SmemRandomBits;
subtract_reference subtract_row_max; take_dq compute_own_dq; take_loads wait_and_release; take_part next_part;
tile_counter tile_count_semaphore; tile_cut_before tile_split_before; tile_place swizzle;
TileOrder WorkTileScheduler; TileQueue WorkPipeline; TileWords TileBits; turn_added dq_added;
turn_passed dq_released; turn_words semaphore_words; unseen_keys num_masked_keys; v_place v_state;
varlen_key_block varlen_bwd_work_tile; varlen_order varlen_tile_order; varlen_row_block varlen_work_tile;
wait_for_token wait_for_order_barrier; wait_for_turn dq_semaphore_acquire; wait_for_turn_at dq_semaphore_acquire;
wait_until_taken acquire; widened_backward pad_head_dim; widened_call pad_head_dim; widened_forward pad_head_dim
""".split(";")
)

# Phrases that comments and docstrings of csrc and flash_attn may not use, and what the field says.
PHRASES = {
    r"go(es|ing)? ahead|gone ahead": "speculative",
    r"let(s|ting)? go|lets? (its|the|a) blocks? pass": "release, skip",
    r"turns? at|(pass(es)?|take|takes) the turn|whose turn": "dq_semaphore, order barrier",
    r"keyless|(saw|sees|seen) nothing": "fully masked row",
    r"words? of (the )?columns?|column words?": "random bits, col_bits",
    r"hidden (steps?|blocks?)": "skipped blocks",
    r"interior|edge blocks?|edges and": "masked and unmasked blocks",
    r"row blocks?": "work tile, m_block",
    r"key blocks?": "n_block",
    r"shares? of (the )?keys": "split",
    r"merge[sd]?|merging": "combine",
    r"lines? of work": "linearised work",
    r"stretch(es)?": "CTA range",
    r"teams?": "consumer group",
    r"sections? of heads|in sections": "band",
    r"late tiles?|drawn late|draws? (late|tiles)": "tail tiles, dynamic scheduler",
    r"pieces?": "16-byte vector",
    r"slack|references? of the softmax": "rescale threshold, row max",
    r"is cut|are cut|was cut|be cut|were cut": "split",
    r"served? as refused|is refused|refused here": "rejected",
}


def sources(folders):
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    names = [path.relative_to(ROOT).as_posix() for path in files if path.is_file() and "__pycache__" not in path.parts]
    return [name for name in names if not name.startswith(CLOSED)]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def old_identifiers(name, text):
    words = set(re.findall(r"[A-Za-z_]\w*", f"{Path(name).stem} {text}"))
    return sorted(f"{name}: {word} is {IDENTIFIERS[word]}" for word in words & set(IDENTIFIERS))


def joined(comments):
    """Comments of a file by line, those of consecutive lines joined: phrases may wrap."""
    groups, last = [], None
    for line, comment in comments:
        if line - 1 == last:
            groups[-1] += f" {comment}"
        else:
            groups.append(comment)
        last = line
    return groups


def cpp_comments(text):
    lines = [re.sub(r'"(\\.|[^"\\])*"', '""', line).partition("//") for line in text.splitlines()]
    return joined((number, comment) for number, (_, slashes, comment) in enumerate(lines) if slashes)


def python_comments(text):
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    return [*joined((token.start[0], token.string.lstrip("#")) for token in tokens), *filter(None, docstrings)]


def old_phrases(name, text):
    found = []
    for comment in python_comments(text) if name.endswith(".py") else cpp_comments(text):
        for phrase, meant in PHRASES.items():
            match = re.search(rf"\b({phrase})\b", " ".join(comment.split()), re.IGNORECASE)
            if match:
                found.append(f"{name}: '{match[0]}' is {meant}: {' '.join(comment.split())[:200]}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_old_identifier(folder):
    names = sources([folder])
    assert names
    assert [found for name in names for found in old_identifiers(name, text_of(name))] == []


@pytest.mark.parametrize("folder", ["csrc", "flash_attn"])
def test_no_old_phrase_in_comments(folder):
    names = [name for name in sources([folder]) if name.endswith((".h", ".cu", ".cpp", ".py"))]
    assert names
    assert [found for name in names for found in old_phrases(name, text_of(name))] == []


def test_old_words_are_found():
    assert old_identifiers("a/key_walk.h", "int kGoesAhead = x.row_blocks;") == [
        "a/key_walk.h: kGoesAhead is kSpeculativeExp",
        "a/key_walk.h: key_walk is kv_block_order",
        "a/key_walk.h: row_blocks is m_blocks",
    ]
    assert len(old_phrases("a.h", "int i;  // It lets\nint j;\n// It lets\n// go of a\n// row block.\n")) == 2
    assert old_phrases("a.h", 'fail("row block");  // of 2\n') == []
    assert len(old_phrases("a.py", '"""Row\nblocks."""\nx = "row block"  # a\n# keyless row\n')) == 2
