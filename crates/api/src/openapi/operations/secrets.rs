//! Operations on secrets.

use crate::openapi::operation::Operation;
use crate::routes::bounds::DEFAULT_SECRETS;
use jiffy_api_types::{NewSecret, Secret, SecretUpdate};

/// Operations on secrets.
pub(super) fn secrets() -> Vec<Operation> {
    vec![
        Operation::get(
            "/secrets",
            "listSecrets",
            "List the secrets of the key by name, without their values",
        )
        .paged_by_name(DEFAULT_SECRETS)
        .answers::<Vec<Secret>>(200, "Secrets"),
        Operation::post(
            "/secrets",
            "createSecret",
            "Create a secret. No call returns its value",
        )
        .takes::<NewSecret>()
        .answers::<Secret>(201, "Secret without its value")
        .fails_with(&[409]),
        Operation::get(
            "/secrets/{secretID}",
            "getSecret",
            "Get a secret of the key by id or name, without its value",
        )
        .answers::<Secret>(200, "Secret without its value"),
        Operation::post(
            "/secrets/{secretID}",
            "updateSecret",
            "Replace the value of a secret",
        )
        .takes::<SecretUpdate>()
        .answers::<Secret>(200, "Secret without its value"),
        Operation::delete("/secrets/{secretID}", "deleteSecret", "Remove a secret")
            .answers_no_content(),
    ]
}
