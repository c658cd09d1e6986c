//! Errors.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of an error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorBody {
    /// Status of the response.
    #[schemars(range(min = 400, max = 599))]
    pub code: u16,
    /// Description of the error with a remedy.
    pub message: String,
    /// Name of the error for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}
