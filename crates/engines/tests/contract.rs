//! Contract of every engine (`jiffy_engine_api::Engine`), tested with each engine that this machine
//! supports.
#![allow(clippy::unwrap_used, clippy::panic)]

mod copies;
mod detached;
mod ends;
mod errors;
mod life;
mod place;

/// Generates a test per engine for each part of the contract.
macro_rules! contract {
    ($($module:ident::$test:ident,)*) => {
        contract! { @of microvm MicroVm $($module::$test,)* }
        contract! { @of gvisor Gvisor $($module::$test,)* }
    };
    (@of $engine:ident $variant:ident $($module:ident::$test:ident,)*) => {
        mod $engine {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    let name = concat!(stringify!($engine), "::", stringify!($test));
                    let engine = jiffy_engine_api::EngineName::$variant;
                    if let Some(place) = crate::contract::place::Place::of(engine, name) {
                        let run = crate::contract::$module::$test(&place);
                        crate::support::within(name, run).await;
                        place.wait_empty().await;
                    }
                }
            )*
        }
    };
}

contract! {
    life::an_unassigned_guest_waits_and_takes_its_assigned_identity,
    life::commands_run_and_report_their_exit_status,
    life::files_are_written_and_read,
    life::a_connection_to_a_closed_port_reads_as_closed,
    life::out_of_memory_kills_only_the_program_that_uses_the_memory,
    life::a_full_disk_is_an_error_and_does_not_end_the_guest,
    life::usage_grows_when_the_guest_computes,
    life::a_sandbox_starts_on_the_selected_engine,
    copies::a_snapshot_is_a_copy_and_its_guest_continues,
    copies::a_stream_stays_open_across_a_snapshot,
    copies::a_snapshot_that_stops_its_guest_preserves_its_state_and_leaves_no_process,
    copies::two_restores_of_one_snapshot_are_two_guests_with_the_same_files,
    copies::a_rollback_restores_the_earlier_state_of_the_same_sandbox,
    copies::an_identity_given_at_the_start_can_be_replaced,
    copies::a_failed_snapshot_has_no_effect,
    copies::a_removed_snapshot_does_not_affect_guests_restored_from_it,
    ends::dropped_guests_leave_no_resources,
    ends::a_stopped_guest_reports_that_it_was_stopped,
    ends::a_guest_that_shuts_down_reports_it,
    ends::a_guest_that_is_killed_reports_it,
    detached::a_detached_guest_is_adopted_by_its_handle_and_continues,
    detached::an_unknown_detached_guest_is_terminated,
    detached::a_guest_that_has_ended_cannot_be_adopted,
    detached::a_killed_detached_guest_leaves_no_resources,
    errors::capabilities_match_the_supported_operations,
    errors::a_snapshot_is_restored_by_the_engine_that_took_it,
    errors::invalid_names_are_rejected,
}
