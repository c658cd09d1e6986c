//! Direct connections: client connections that the process of an owner serves itself, without the
//! gateway.

use super::Functions;
use crate::direct_link::{BoxConnectionPermit, OpenConnection};
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use std::os::fd::OwnedFd;

impl Functions {
    /// Passes a client connection to the process of a function. Starts the process and loads the
    /// function if necessary. No byte may have been read from `stream`. `host` is the host of the
    /// first request. `permit` is dropped when the connection is closed.
    pub async fn hand_over(
        &self,
        record: &FunctionRecord,
        host: &str,
        stream: &OwnedFd,
        permit: BoxConnectionPermit,
    ) -> Result<(), FunctionError> {
        let owner = self.existing_owner(record.owner.as_deref(), &record.name)?;
        let state = owner.function(&record.name)?;
        let in_use = self.loaded(&owner, &record.name).await?;
        let link = in_use.0.direct().await?;
        let connection = OpenConnection::new(state, in_use.into_counted(), permit);
        link.hand_over(&record.name, host, stream, connection).await
    }
}
