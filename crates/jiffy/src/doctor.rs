//! `jiffy doctor`: checks whether this host can run sandboxes, and explains how to fix problems.

mod checks;
mod files;
mod guest;
mod kernel;
mod measure;
mod security;

use crate::cli::DoctorArgs;
use serde::Serialize;
use std::process::ExitCode;

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// The requirement is met.
    Ok,
    /// Sandboxes run, with a limitation.
    Note,
    /// Sandboxes cannot run.
    Fail,
}

/// One line of the report.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// Subject of the check.
    // The names `what` and `found` are part of the JSON output.
    #[serde(rename = "what")]
    pub check: &'static str,
    /// Outcome of the check.
    pub status: Status,
    /// Description of the result.
    #[serde(rename = "found")]
    pub description: String,
    /// Remedy. `None` if no action is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, description: impl Into<String>) -> Self {
        Self {
            check,
            status: Status::Ok,
            description: description.into(),
            remedy: None,
        }
    }

    /// Result of a check that found a limitation, with its remedy.
    fn note(
        check: &'static str,
        description: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            check,
            status: Status::Note,
            description: description.into(),
            remedy: Some(remedy.into()),
        }
    }

    /// Result of a check that found an obstacle: sandboxes do not work.
    fn fail(
        check: &'static str,
        description: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            status: Status::Fail,
            ..Self::note(check, description, remedy)
        }
    }

    fn print(&self) {
        let mark = match self.status {
            Status::Ok => "ok  ",
            Status::Note => "note",
            Status::Fail => "FAIL",
        };
        outln!("{mark}  {:<14} {}", self.check, self.description);
        if let Some(remedy) = &self.remedy {
            outln!("      {:<14} -> {remedy}", "");
        }
    }
}

/// Runs all checks. Exits successfully if sandboxes can run on this host.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = Vec::new();
    let mut report = |finding: Finding| {
        if !args.json {
            finding.print();
        }
        findings.push(finding);
    };
    if args.security {
        security::run_all(&mut report);
    } else {
        checks::run_all(&mut report);
    }
    let is_usable = |findings: &[Finding]| findings.iter().all(|f| f.status != Status::Fail);
    if !args.no_boot && !args.security {
        if is_usable(&findings) {
            // A new closure for each group of checks, because `is_usable` reads the findings in
            // between.
            let mut report = |finding: Finding| {
                if !args.json {
                    finding.print();
                }
                findings.push(finding);
            };
            guest::boot(&mut report);
            if args.measure && is_usable(&findings) {
                let mut report = |finding: Finding| {
                    if !args.json {
                        finding.print();
                    }
                    findings.push(finding);
                };
                measure::run(args, &mut report);
            }
        } else if !args.json {
            outln!("--    guest          not booted: fix the problems above first");
        }
    }
    if args.json {
        outln!("{}", jiffy_client::terminal::json(&findings)?);
    }
    Ok(if is_usable(&findings) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
