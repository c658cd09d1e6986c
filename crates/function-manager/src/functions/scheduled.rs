//! Calls functions at the times of their schedules (cron notation).
//!
//! A call that is too late, or whose predecessor still runs, is skipped and counted.

use super::Functions;
use crate::function_error::FunctionError;
use crate::function_state::FunctionState;
use crate::request_body::{BoxError, RequestBody};
use crate::schedule::{Schedule, ScheduleStatus};
use http_body_util::{BodyExt, Empty};
use hyper::header::HOST;
use hyper::{Method, Request};
use jiff::Timestamp;
use std::sync::Arc;

/// Header of scheduled requests, with the schedule's expression.
const SCHEDULE_HEADER: &str = "jiffy-schedule";
/// Host of scheduled requests.
const SCHEDULE_HOST: &str = "localhost";

impl Functions {
    /// Starts the calls that are due at `now`. Must be called inside a tokio runtime.
    pub fn run_schedules(&self, now: Timestamp) {
        for owner in self.owners() {
            for state in owner.states() {
                if state.start_scheduled(now) {
                    let (functions, state) = (self.clone(), state.clone());
                    tokio::spawn(async move { functions.run_scheduled(&state).await });
                }
            }
        }
    }

    async fn run_scheduled(&self, state: &Arc<FunctionState>) {
        let status = self.call_scheduled(state).await;
        if let Err(e) = &status {
            let name = &state.record().name;
            tracing::warn!(function = name, error = %e, "scheduled call of a function failed");
        }
        // A change of the function during the call may have removed the schedule. If the change
        // replaced the schedule, the new schedule receives the result.
        if let Some(schedule) = &mut *state.schedule.lock() {
            schedule.record_end(status.ok());
        }
    }

    /// Calls a function at its scheduled time. Returns the HTTP status.
    async fn call_scheduled(&self, state: &FunctionState) -> Result<u16, BoxError> {
        let record = state.record();
        let expression = record.schedule.clone().unwrap_or_default();
        let body: RequestBody = Empty::new().map_err(|never| match never {}).boxed_unsync();
        let request = Request::builder()
            .method(Method::POST)
            .uri("/")
            .header(HOST, SCHEDULE_HOST)
            .header(SCHEDULE_HEADER, expression)
            .body(body)?;
        let response = self.send(&record, request).await?;
        let status = response.status().as_u16();
        let mut body = response.into_body();
        // The call ends with its body, during which the function still runs.
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok(status)
    }

    /// Returns the status of a function's schedule. `None` if the function has no schedule.
    pub fn schedule_status(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<Option<ScheduleStatus>, FunctionError> {
        let state = self.existing_owner(key, name)?.function(name)?;
        let schedule = state.schedule.lock();
        Ok(schedule.as_ref().map(Schedule::status))
    }
}
