//! Promises of every engine (`jiffy_engine_api::Engine`), checked on each that this machine has.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

mod copies;
mod ends;
mod kept;
mod life;
mod place;
mod refusals;

/// Each promise as a test of each engine.
macro_rules! promises {
    ($($room:ident::$promise:ident,)*) => {
        promises! { @of microvm MicroVm $($room::$promise,)* }
        promises! { @of gvisor Gvisor $($room::$promise,)* }
    };
    (@of $engine:ident $name:ident $($room:ident::$promise:ident,)*) => {
        mod $engine {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $promise() {
                    let test = concat!(stringify!($engine), "::", stringify!($promise));
                    let engine = jiffy_engine_api::EngineName::$name;
                    if let Some(place) = crate::place::Place::of(engine, test) {
                        let kept = crate::$room::$promise(&place);
                        crate::support::within(test, kept).await;
                        place.is_empty().await;
                    }
                }
            )*
        }
    };
}

promises! {
    life::an_arrival_waits_until_it_is_welcomed_and_becomes_the_one_it_is_told_to_be,
    life::commands_run_and_say_how_they_ended,
    life::files_are_written_and_read,
    life::a_port_where_nobody_listens_reads_as_closed,
    life::memory_that_is_used_up_costs_the_program_that_used_it_and_nobody_else,
    life::a_disk_that_is_full_is_an_error_and_no_end,
    life::use_grows_when_the_guest_computes,
    life::a_sandbox_comes_up_on_the_engine_that_is_named_beside_another,
    copies::a_snapshot_is_a_copy_and_its_guest_goes_on,
    copies::a_stream_stays_open_over_a_snapshot,
    copies::a_snapshot_that_ends_its_guest_leaves_no_process_and_loses_nothing,
    copies::two_restores_of_one_snapshot_are_two_guests_with_the_same_files,
    copies::a_rollback_brings_back_the_same_one_as_it_was,
    copies::a_guest_that_was_told_while_it_started_is_the_one_that_it_is_assigned,
    copies::a_snapshot_that_cannot_be_written_costs_nothing,
    copies::a_removed_snapshot_is_gone_and_takes_nothing_from_those_made_of_it,
    ends::what_is_dropped_leaves_nothing,
    ends::who_is_stopped_was_told_to,
    ends::a_guest_that_shuts_itself_down_says_so,
    ends::a_guest_that_is_killed_from_outside_is_told_as_that,
    kept::a_kept_guest_is_found_by_its_handle_and_goes_on,
    kept::a_kept_guest_that_nobody_knows_is_ended,
    kept::a_handle_of_a_guest_that_is_gone_finds_none,
    kept::a_kept_guest_that_is_killed_leaves_nothing,
    refusals::what_it_cannot_do_it_refuses_and_what_it_can_it_does,
    refusals::a_snapshot_is_restored_by_the_engine_that_took_it,
    refusals::names_that_are_none_are_refused,
}
